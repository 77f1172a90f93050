"""The account of waiting for data: what a rank tells of it, against its marks around it.

Like `runbook.read.accounts`: every function returns what does not balance, in words.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from nsa.contract import Event
from runbook.read.clocks import joined
from runbook.records.evidence import RankLog

if TYPE_CHECKING:
    import pandas as pd

# Between the marks lies the writing of the first one too: 0.02 to 0.04 ms in a typical step.
# On CUDA the allocator is asked on the way: 0.13 to 0.30 ms (one H200).
MARK_S, MARK_CUDA_S, MARK_SHARE = 1e-4, 5e-4, 0.25
# One pause of the machine at that very place, in a whole launch.
PAUSE_S = 0.05
# Of so many steps one such pause is no longer the one in the middle.
_MIDDLE = 3
# Both are rounded to a microsecond.
_ROUNDED_S = 5e-6
# No step waits for some thirty years.
_LONGEST_S = 1e9
# Between the marks too, where it happens.
_WITHIN = frozenset({Event.MEMORY_DUMP, Event.PROFILER})


def fetch_account(frame: pd.DataFrame, ranks: Sequence[RankLog], device: str) -> list[str]:
    """The time that a rank says it waited for data is that between its two marks."""
    mark_s = MARK_CUDA_S if device == "cuda" else MARK_S
    if "fetch_s" not in frame:
        return ["the CSV has no column fetch_s"]
    problems = []
    for rank in ranks:
        if rank.steps is None:
            continue
        if not _is_marked(rank.steps):
            problems.append(f"rank {rank.rank} does not mark when it had its data")
            continue
        if rank.steps["fetch_s"].isna().all():
            problems.append(f"rank {rank.rank} does not say how long its steps waited for data")
            continue
        within = [step for step, kinds in rank.beside.items() if not _WITHIN.isdisjoint(kinds)]
        steps = rank.steps[~rank.steps["step"].isin(within)]
        if rank.rank == 0:
            said, clock = _of_table(frame, steps)
        else:
            steps = steps[steps["fetch_s"].notna()]
            said, clock = steps["fetch_s"], steps["fetch_clock_s"]
        problems += [f"rank {rank.rank} {text}" for text in _problems(said, clock, mark_s)]
    return problems


def _is_marked(steps: pd.DataFrame) -> bool:
    """Does every step have both marks, as far apart as clocks can be?"""
    return "fetch_clock_s" in steps and bool(steps["fetch_clock_s"].between(0, _LONGEST_S).all())


def _of_table(frame: pd.DataFrame, steps: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """What training.csv says, and rank 0's marks, of the steps that both have."""
    both = joined(frame[["step", "fetch_s"]], steps, "fetch_clock_s")
    both = both[both["fetch_clock_s_said"].notna()]
    return both["fetch_s"], both["fetch_clock_s_said"]


def _problems(said: pd.Series, clock: pd.Series, mark_s: float) -> Iterator[str]:
    """More than lies between the marks in a step; less in a typical one, or in all together."""
    if said.empty:
        return
    more = ~((said >= 0) & (said <= clock + _ROUNDED_S))
    if more.any():
        yield (
            f"says that a step waited {said[more].iloc[0]:.4g} s for data, between its marks lie "
            f"{clock[more].iloc[0]:.4g} s ({int(more.sum())} steps)"
        )
        return
    left, typical = clock - said, float(clock.median())
    if len(left) >= _MIDDLE and not float(left.median()) <= mark_s + MARK_SHARE * typical:
        yield (
            f"says that a typical step waits {float(said.median()):.4g} s for data, between its "
            f"marks lie {typical:.4g} s"
        )
        return
    total = float(clock.sum())
    if not float(left.sum()) <= len(left) * mark_s + MARK_SHARE * total + PAUSE_S:
        yield (
            f"says that it waited {float(said.sum()):.4g} s for data, between its marks lie "
            f"{total:.4g} s"
        )
