"""Time between the ends of two steps that is not the step's: waiting for data, and what is beside.

Only what the plan asks for may be beside a step: both clocks leave it out, so that the time in it
is nobody's throughput. Where it ends the time of the step begins anew, which is held here too,
each step against its own marks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from nsa.contract import Event
from nsa.contract.digests import recomputed_steps
from runbook.accounts import each_rank
from runbook.accounts.clocks import (
    PAUSE_S,
    PLACE_S,
    STEP_S,
    STEP_TOLERANCE,
    goes_on,
    joined,
    median_error,
)
from runbook.folder.launch.documents import recorded_toggles
from runbook.records.evidence import Column, Frame, RankLog

# Between the marks lies the writing of the first one too: 0.02 to 0.04 ms in a typical step.
# On CUDA the allocator is asked on the way: 0.13 to 0.30 ms (one H200).
MARK_S, MARK_CUDA_S, MARK_SHARE = 1e-4, 5e-4, 0.25
# One pause of the machine at that very place, in a whole launch.
ONE_PAUSE_S = 0.05
# Of so many steps one such pause is no longer the one in the middle.
_MIDDLE = 3
# Both are rounded to a microsecond.
_ROUNDED_S = 5e-6
# No step waits for some thirty years.
_LONGEST_WAIT_S = 1e9
# Between the marks too, where it happens.
_WITHIN_A_FETCH = frozenset({Event.MEMORY_DUMP, Event.PROFILER})
# Steps that a thing of this kind may be beside, each time that it is asked for: what begins in one
# step may end in the next.
_ASKED = {
    Event.EVAL_START: "train.eval_every",
    Event.EVAL: "train.eval_every",
    Event.CHECKPOINT_START: "train.save_every",
    Event.CHECKPOINT: "train.save_every",
    Event.MEMORY_DUMP: "NSA_MEM_DUMP_EVERY",
}
_STEPS_EACH = 2
# Proofs of toggles, compiling and one profile: so many steps in each block of an arm.
_PROOFS_A_BLOCK = 10
_KNOWN = frozenset(Event)
# The step's time begins anew after these: at its step_start, or where it was computed once more.
_ENDS_BEFORE = frozenset({Event.EVAL_START, Event.EVAL, Event.CHECKPOINT_START})
# It begins the time anew in some steps and not in others.
_UNKNOWN = frozenset({Event.PROFILER, Event.PROFILE_SAVE})
# Steps of one kind by what was beside them.
_GROUPS: Mapping[str, Callable[[frozenset[str]], bool]] = {
    "after an evaluation or a save": lambda kinds: (
        bool(kinds & _ENDS_BEFORE) and not kinds & {*_UNKNOWN, Event.RECOMPUTED}
    ),
    "after their second computation": lambda kinds: (
        Event.RECOMPUTED in kinds and not kinds & _UNKNOWN
    ),
}
# One pause of the machine between a mark and the clock, in a whole launch; others are PAUSE_S.
_LONGEST_S = 0.5
# So many steps have a middle that one pause cannot move, so many one that few can.
_SOME, _MANY = 3, 10


def fetch_account(frame: Frame, ranks: Sequence[RankLog], device: str) -> list[str]:
    """The time that a rank says it waited for data is that between its two marks."""
    if "fetch_s" not in frame:
        return ["the CSV has no column fetch_s"]
    return _wait_problems(frame, ranks, MARK_CUDA_S if device == "cuda" else MARK_S)


@each_rank
def _wait_problems(frame: Frame, rank: RankLog, mark_s: float) -> Iterator[str]:
    """More than lies between the marks in a step; less in a typical one, or in all together."""
    if rank.steps is None:
        return
    marks = rank.steps.get("fetch_clock_s")
    if marks is None or not marks.between(0, _LONGEST_WAIT_S).all():
        yield " does not mark when it had its data"
        return
    if rank.steps["fetch_s"].isna().all():
        yield " does not say how long its steps waited for data"
        return
    busy = {step for step, kinds in rank.beside.items() if kinds & _WITHIN_A_FETCH}
    steps = rank.steps[["step", "fetch_s", "fetch_clock_s"]]
    steps = steps[~steps["step"].isin(busy)]
    if rank.rank == 0:  # which writes the CSV
        both = joined(frame[["step", "fetch_s"]], steps, "fetch_clock_s")
        steps = both.rename(columns={"fetch_clock_s_said": "fetch_clock_s"})
    steps = steps.dropna(subset=["fetch_clock_s", *(["fetch_s"] if rank.rank else [])])
    said, clock = steps["fetch_s"], steps["fetch_clock_s"]
    if said.empty:
        return
    more = ~((said >= 0) & (said <= clock + _ROUNDED_S))
    if more.any():
        yield (
            f" says that a step waited {said[more].iloc[0]:.4g} s for data, between its marks lie "
            f"{clock[more].iloc[0]:.4g} s ({int(more.sum())} steps)"
        )
        return
    left, typical = clock - said, float(clock.median())
    if len(left) >= _MIDDLE and not float(left.median()) <= mark_s + MARK_SHARE * typical:
        yield (
            f" says that a typical step waits {float(said.median()):.4g} s for data, between its "
            f"marks lie {typical:.4g} s"
        )
        return
    total = float(clock.sum())
    if not float(left.sum()) <= len(left) * mark_s + MARK_SHARE * total + ONE_PAUSE_S:
        yield (
            f" says that it waited {float(said.sum()):.4g} s for data, between its marks lie "
            f"{total:.4g} s"
        )


@each_rank
def beside_account(frame: Frame, rank: RankLog, env: Mapping[str, Any]) -> list[str]:
    """Ranks that did beside their steps what env.json does not ask for, or did it too often."""
    every, blocks, last = _every(env), _blocks(frame), (env.get("effective") or {}).get("steps")
    found = (*_unasked(rank, every, blocks, len(frame)), *_undrawn(rank, last))
    return [f" did beside {text}" for text in found]


def _undrawn(rank: RankLog, last: int | None) -> Iterator[str]:
    """Steps that were computed a second time, and no token draws them."""
    drawn = {
        step
        for token in rank.tokens
        for step in recomputed_steps(token, rank.first_step or 1, last or 1)
    }
    odd = [s for s, kinds in rank.beside.items() if Event.RECOMPUTED in kinds and s not in drawn]
    if odd:
        yield f"{len(odd)} steps {Event.RECOMPUTED}, first {odd[0]}, which no token draws"


def _unasked(rank: RankLog, every: Mapping[str, int], blocks: int, steps: int) -> Iterator[str]:
    seen = Counter(kind for kinds in rank.beside.values() for kind in kinds)
    for kind in sorted(seen.keys() & _ASKED.keys()):
        name = _ASKED[Event(kind)]
        cadence = every.get(name, 0)
        allowed = _STEPS_EACH * (steps // cadence + 1) if cadence else 0
        if seen[kind] > allowed:
            yield f"{seen[kind]} steps {kind}, of which no clock counts the time ({name}={cadence})"
    for kind in sorted(seen.keys() - _KNOWN):
        yield f"{seen[kind]} steps {kind[:40]!r}, which nothing asks for and no clock counts"
    others = _KNOWN - _ASKED.keys() - {Event.RECOMPUTED}
    proven = sum(not others.isdisjoint(kinds) for kinds in rank.beside.values())
    if proven > _PROOFS_A_BLOCK * blocks:
        kinds = ", ".join(sorted(seen.keys() & others))
        yield f"{proven} steps {kinds}, in {blocks} block(s): no clock counts the time"


def _every(env: Mapping[str, Any]) -> dict[str, int]:
    """How often, in steps, each kind is asked for; 0 for never."""
    train = (env.get("config") or {}).get("train") or {}
    toggles = recorded_toggles(env)
    told = {f"train.{name}": train.get(name) for name in ("eval_every", "save_every")}
    told["NSA_MEM_DUMP_EVERY"] = toggles.get("NSA_MEM_DUMP_EVERY")
    return {
        name: int(value) if isinstance(value, int | float) and value > 0 else 0
        for name, value in told.items()
    }


def _blocks(frame: Frame) -> int:
    places = [name for name in ("arm", "block") if name in frame]
    return int(frame.groupby(places, dropna=False).ngroups) if places else 1


def restart_account(frame: Frame, ranks: Sequence[RankLog], *, lag: int = 0) -> list[str]:
    """Steps after an evaluation, a save or a second computation whose dt_s is not their time.

    Of rank 0, which writes dt_s. lag: as in `time_account`.
    """
    rank = next((one for one in ranks if one.rank == 0), None)
    if rank is None or rank.steps is None or "dt_s" not in frame:
        return []
    if "timed_from" not in rank.steps:
        return ["rank 0 does not mark where its steps begin"]
    both = _marked(frame, rank.steps, lag)
    problems = []
    # With a lag a device may still be at work in the others when the host has gone on.
    for name, belongs in list(_GROUPS.items())[: 1 if lag else None]:
        steps = [step for step, kinds in rank.beside.items() if belongs(kinds)]
        problems += [f"{text} {name}" for text in _restart_problems(both, steps, lag)]
    return problems


def _marked(frame: Frame, steps: Frame, lag: int) -> Frame:
    """Steps within a block, with their dt_s and marks, s.

    `latest` is when the device has ended the step at the latest: with a lag the host has seen that
    before it ends the next but one.
    """
    own = steps[["step", "timed_from", "mono"]].assign(latest=steps["mono"].shift(-2 * lag))
    both = joined(frame, own, "timed_from", "mono", "latest")
    kept = both[both["step"].isin(frame["step"][goes_on(frame)])]
    return kept.rename(columns=lambda name: name.removesuffix("_said"))


def _restart_problems(both: Frame, steps: list[int], lag: int) -> Iterator[str]:
    """One step by more than a long pause, two by more than short ones, or the middle of some."""
    if not steps:
        return
    both = both[both["step"].isin(steps)]
    clock = both["mono"] - both["timed_from"]
    # With a lag a step takes at least as long as the host; without one it takes just as long.
    least, most = clock - both["dt_s"], both["latest"] - both["timed_from"] - both["dt_s"]
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


def _allowed_middle(off: Column, usual: float, lag: int) -> float:
    if len(off) < _SOME:
        return math.inf
    if len(off) < _MANY or lag:
        return STEP_TOLERANCE * usual + PLACE_S
    return STEP_TOLERANCE * usual + STEP_S + median_error(off)
