"""Who is late in step after step, by the flight records: one rank, or all ranks of one node."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from runbook.folder.launch.documents import Load
from runbook.launch.incident.flight import Collective, Flight

# How a note begins that blames the machine for a late rank, and not the rank.
SHORT_OF_CPUS = "short of CPUs"

_LONGEST_PERIOD = 256
# A lag that every step has, of this size at least, is no scheduling noise.
_LAG_S, _LAG_SHARE, _SAME_SHARE, _FEWEST_STEPS = 0.010, 0.05, 0.8, 12

Lags = Mapping[int, float]


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """The ranks that all others wait for in step after step, and how long (median, s).

    They are one rank, or all ranks of `node`, which is empty where there is only this machine.
    `ranks` is how many the launch has.
    """

    late: tuple[int, ...]
    ranks: int
    lag_s: float
    steps: int
    step_s: float
    node: str = ""

    def is_short_of_cpus(self, load: Load | None) -> bool:
        """May it only have waited for a CPU?"""
        return load is not None and self.lag_s <= load.short_of(self.ranks) * self.step_s

    def text(self, load: Load | None) -> str:
        """For a note. A rank that may only have waited for a CPU is not called a straggler."""
        late = (
            f"{self._who()} {self.lag_s * 1000:.0f} ms late in each of "
            f"{self.steps} steps of {self.step_s * 1000:.0f} ms"
        )
        if load is None or not self.is_short_of_cpus(load):
            return f"straggler: {late}"
        taken = f"other work took {load.taken * load.cpus:.1f} of {load.cpus} CPUs"
        return f"{SHORT_OF_CPUS}: {late}, but {self.ranks} ranks ran while {taken}"

    def _who(self) -> str:
        if len(self.late) > 1:
            return f"node {self.node} (ranks {', '.join(map(str, self.late))}) comes"
        on = f" on node {self.node}" if self.node else ""
        return f"rank {self.late[0]}{on} comes"


def one_machine(_: int) -> str:
    """The node of each rank where there is only this machine."""
    return ""


def find_straggler(
    flights: Mapping[int, Flight], where: Callable[[int], str] = one_machine
) -> Straggler | None:
    """Who enters the collectives later than all others in nearly every step.

    `where` gives the node of a rank. The node is named where all of its ranks are late together,
    one rank otherwise. Needs at least 12 whole steps; a step is one period of the pattern of
    collectives.
    """
    by_rank = {r: {c.seq: c for c in f.collectives} for r, f in flights.items()}
    if len(by_rank) < 2:
        return None
    first = next(iter(by_rank.values()))
    steps = _steps(by_rank, first)
    if len(steps) < _FEWEST_STEPS:
        return None
    nodes = {rank: where(rank) for rank in by_rank}
    lags = [_lags(step, by_rank, clocks=len(set(nodes.values()))) for step in steps]
    begin, end = first[steps[-1][0]].created_s, first[steps[0][-1]].created_s
    step_s = (end - begin) / len(steps)
    alone = _latest(lags, step_s)
    found = _late_node(lags, nodes, step_s) or (alone and ((alone[0],), alone[1]))
    if found is None:
        return None
    late, lag_s = found
    return Straggler(
        late=late,
        ranks=len(by_rank),
        lag_s=lag_s,
        steps=len(steps),
        step_s=step_s,
        node=nodes[late[0]],
    )


def _late_node(
    lags: Sequence[Lags], nodes: Mapping[int, str], step_s: float
) -> tuple[tuple[int, ...], float] | None:
    """The ranks of the node of which even the first one is late, and how late that one is, s."""
    groups: dict[str, list[int]] = {}
    for rank, node in nodes.items():
        groups.setdefault(node, []).append(rank)
    if len(groups) < 2 or all(len(group) < 2 for group in groups.values()):
        return None
    earliest = [
        {group[0]: min(lag[rank] for rank in group) for group in groups.values()} for lag in lags
    ]
    found = _latest(earliest, step_s)
    return None if found is None else (tuple(groups[nodes[found[0]]]), found[1])


def _latest(lags: Sequence[Lags], step_s: float) -> tuple[int, float] | None:
    """Who is the latest in nearly all steps, and by how much (median, s), if that is no noise."""
    latest = [max(lag, key=lambda rank: lag[rank]) for lag in lags]
    rank = statistics.mode(latest)
    lag_s = statistics.median(lag[rank] for lag in lags)
    steady = latest.count(rank) >= _SAME_SHARE * len(latest)
    return (rank, lag_s) if steady and lag_s >= max(_LAG_S, _LAG_SHARE * step_s) else None


def _lags(
    step: Sequence[int], by_rank: Mapping[int, Mapping[int, Collective]], *, clocks: int
) -> dict[int, float]:
    """How late each rank was in a step, against the first one at each collective, s.

    With several `clocks`, what a rank is late by at every collective of the step is left out: that
    is how far its clock is ahead, since who is waited for goes on together with the others.
    """
    late: dict[int, list[float]] = {rank: [] for rank in by_rank}
    for seq in step:
        earliest = min(seen[seq].created_s for seen in by_rank.values())
        for rank, seen in by_rank.items():
            late[rank].append(seen[seq].created_s - earliest)
    return {rank: max(of) - (min(of) if clocks > 1 else 0.0) for rank, of in late.items()}


def _steps(
    by_rank: Mapping[int, Mapping[int, Collective]], first: Mapping[int, Collective]
) -> list[list[int]]:
    """The numbers of the collectives of each whole step that all ranks have, the last one first.

    From the end: the beginning of a run is not periodic. What stands between two steps, such as a
    step computed a second time, is passed over.
    """
    common = sorted(set.intersection(*(set(seen) for seen in by_rank.values())))
    found = _pattern([first[seq].kind for seq in common])
    if found is None:
        return []
    period, last = found
    kinds = [first[seq].kind for seq in common]
    pattern, steps, end = kinds[last - period : last], [], last
    while end >= period:
        whole = kinds[end - period : end] == pattern
        if whole:
            steps.append(common[end - period : end])
        end -= period if whole else 1
    return steps


def _pattern(kinds: Sequence[tuple[str, str]]) -> tuple[int, int] | None:
    """The shortest period that is there four times, and where it ends.

    The last few collectives of a run (the check of the parameters) are none of a step, and one of
    the last steps may have been computed twice.
    """
    for last in range(len(kinds), 3, -1):
        for period in range(1, min(_LONGEST_PERIOD, last // 4) + 1):
            begin, end = last - 4 * period, last - period
            if all(kinds[i] == kinds[i + period] for i in range(begin, end)):
                return period, last
    return None
