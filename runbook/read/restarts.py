"""The account of steps that have something beside them: `dt_s` begins where that ends.

The account of all steps leaves these out, since between their ends lies more than the step. So
they are held here, each against its own marks: nothing beside a step counts as its time, and
nothing of the step is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from nsa.contract import Event
from runbook.read.clocks import (
    PAUSE_S,
    PLACE_S,
    STEP_S,
    STEP_TOLERANCE,
    joined,
    median_error,
)
from runbook.records.evidence import RankLog

if TYPE_CHECKING:
    import pandas as pd

# The step's time begins anew after these: at its step_start, or where it was computed once more.
_ENDS_BEFORE = frozenset({Event.EVAL_START, Event.EVAL, Event.CHECKPOINT_START})
# These happen in the time of a step, which counts them; with others beside it nobody knows.
_WITHIN = frozenset({Event.CHECKPOINT, Event.MEMORY_DUMP})
# It begins the time anew in some steps and not in others.
_UNKNOWN = frozenset({Event.PROFILER, Event.PROFILE_SAVE})
# One pause of the machine between a mark and the clock, in a whole launch; others are PAUSE_S.
_LONGEST_S = 0.5
# So many steps have a middle that one pause cannot move, so many one that few can.
_SOME, _MANY = 3, 10


def restart_account(frame: pd.DataFrame, ranks: Sequence[RankLog], *, lag: int = 0) -> list[str]:
    """Steps after an evaluation, a save or a second computation whose dt_s is not their time.

    Of rank 0, which writes dt_s. lag: as in `time_account`.
    """
    rank = next((one for one in ranks if one.rank == 0), None)
    if rank is None or rank.steps is None or "dt_s" not in frame:
        return []
    if "timed_from" not in rank.steps:
        return ["rank 0 does not mark where its steps begin"]
    both = _marked(frame, rank.steps, lag)
    groups = {
        "after an evaluation or a save": (_after(rank), "timed_from"),
        "after their second computation": (_twice(rank), "timed_from"),
        "with a dump or the end of a save beside them": (_with_more(rank), "ended_before"),
    }
    if lag:
        # A device may still be at work there when the host has gone on.
        groups = {name: groups[name] for name in list(groups)[:1]}
    problems = []
    for name, (steps, begin) in groups.items():
        problems += [f"{text} {name}" for text in _problems(both, steps, begin, lag)]
    return problems


def _after(rank: RankLog) -> list[int]:
    return [
        step
        for step, kinds in rank.beside.items()
        if kinds & _ENDS_BEFORE and not kinds & (_UNKNOWN | {Event.RECOMPUTED})
    ]


def _twice(rank: RankLog) -> list[int]:
    return [
        step
        for step, kinds in rank.beside.items()
        if Event.RECOMPUTED in kinds and not kinds & _UNKNOWN
    ]


def _with_more(rank: RankLog) -> list[int]:
    return [step for step, kinds in rank.beside.items() if kinds and kinds <= _WITHIN]


def _marked(frame: pd.DataFrame, steps: pd.DataFrame, lag: int) -> pd.DataFrame:
    """Steps within a block, with their dt_s and marks, s.

    `latest` is when the device has ended the step at the latest: with a lag the host has seen that
    before it ends the next but one.
    """
    own = steps[["step", "timed_from", "mono"]].assign(
        ended_before=steps["mono"].shift(), latest=steps["mono"].shift(-2 * lag)
    )
    both = joined(frame, own, "timed_from", "mono", "ended_before", "latest")
    places = frame[[name for name in ("arm", "block") if name in frame]]
    inside = places.eq(places.shift()).all(axis=1)
    kept = both[both["step"].isin(frame["step"][inside])]
    return kept.rename(columns=lambda name: name.removesuffix("_said"))


def _problems(both: pd.DataFrame, steps: list[int], begin: str, lag: int) -> Iterator[str]:
    """One step by more than a long pause, two by more than short ones, or the middle of some."""
    both = both[both["step"].isin(steps)]
    clock = both["mono"] - both[begin]
    # With a lag a step takes at least as long as the host; without one it takes just as long.
    least, most = clock - both["dt_s"], both["latest"] - both[begin] - both["dt_s"]
    off = least.clip(lower=0.0) + most.clip(upper=0.0)
    if off.isna().all():
        return
    off = off[off.notna()]
    # How far beyond the rounding of clocks, the farthest first.
    apart = (off.abs() - STEP_TOLERANCE * clock[off.index]).sort_values(ascending=False)
    worst = apart.index[0]
    if apart.iloc[0] <= _LONGEST_S and not (len(apart) > 1 and apart.iloc[1] > PAUSE_S):
        if abs(float(off.median())) <= _allowed_middle(off, float(clock.median()), lag):
            return
        worst = (off - off.median()).abs().idxmin()
    step, told = int(both["step"][worst]), float(both["dt_s"][worst])
    yield (
        f"dt_s of step {step} is {told:.4f} s, by rank 0's clock the step took "
        f"{told + float(off[worst]):.4f} s ({len(off)} such steps)"
    )


def _allowed_middle(off: pd.Series, usual: float, lag: int) -> float:
    if len(off) < _SOME:
        return math.inf
    if len(off) < _MANY or lag:
        return STEP_TOLERANCE * usual + PLACE_S
    return STEP_TOLERANCE * usual + STEP_S + median_error(off)
