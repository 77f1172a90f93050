"""The ranks' flight records: which collective each one entered, when, where they part, who is late.

A record is written by the rank itself (SIGUSR2, every bad end, the end of a run). Ranks of one
launch run the same collectives in the same order; that alone tells a desynchronised rank (same
number, other operation or shape) from one that never came and from one that comes late.
"""

from __future__ import annotations

import io
import json
import pickle
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Never

from nsa.contract import FLIGHT_COLUMNS, FLIGHTS, NCCL_FLIGHTS, flight_row
from runbook.files import read_bytes
from runbook.folder.launch.documents import Load, json_object

_CONTEXT = 12
_RECENT = 4
# Columns of a row that are read: all but whether the collective was retired.
_READ = len(FLIGHT_COLUMNS) - 1


class _PlainValues(pickle.Unpickler):
    """Reads numbers, text, lists and dictionaries, and refuses everything else."""

    def find_class(self, module: str, name: str) -> Never:
        """Raises UnpicklingError: a dump holds no objects."""
        raise pickle.UnpicklingError(f"a flight dump does not hold {module}.{name}")


def read_nccl_rows(data: bytes) -> list[list[Any]] | None:
    """Rows as in the trainer's own flight records; None if this is no dump."""
    try:
        document = _PlainValues(io.BytesIO(data)).load()
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, IndexError, KeyError,
            AttributeError, OverflowError, UnicodeDecodeError, MemoryError):  # fmt: skip
        # Whatever a torn or foreign file makes of the pickle machine.
        return None
    entries = document.get("entries") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        return None
    return [
        flight_row(entry)[:_READ]
        for entry in entries
        if isinstance(entry, dict) and not entry.get("is_p2p")
    ]


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective as one rank saw it.

    `what` must be equal on all ranks: `all_reduce [[1000]] Float`.
    """

    seq: int
    what: str
    created_s: float


# The last collectives of one rank, oldest first.
Flight = tuple[Collective, ...]


@dataclass(frozen=True, kw_only=True)
class Desync:
    """The first collective in which the ranks differ. `rank` is the one that left the pattern."""

    seq: int
    rank: int | None
    seen: Mapping[int, str]

    def text(self) -> str:
        """For a cause: number, and operation of each rank."""
        ops = "; ".join(f"rank {rank}: {what}" for rank, what in sorted(self.seen.items()))
        return f"desync at collective {self.seq}: {ops}"


def read_flights(run_dir: Path, *, token: str) -> dict[int, Flight]:
    """The readable records of one launch; anything else in the files is left out."""
    flights = {}
    for rank, path in FLIGHTS.found_in(run_dir).items():
        document = json_object(path)
        if document.get("token") == token:
            entries = document.get("entries")
            flights[rank] = _flight(entries if isinstance(entries, list) else [])
    for rank, path in NCCL_FLIGHTS.found_in(run_dir).items():
        # An aborted rank has no record of its own.
        with suppress(OSError):
            rows = None if rank in flights else read_nccl_rows(read_bytes(path))
            if rows is not None:
                flights[rank] = _flight(rows)
    return dict(sorted(flights.items()))


def _flight(rows: Sequence[Any]) -> Flight:
    return tuple(c for c in map(_collective, rows) if c is not None)


def _collective(row: Any) -> Collective | None:
    if not isinstance(row, list) or len(row) < _READ:
        return None
    seq, op, sizes, dtypes, created = row[:_READ]
    if not isinstance(seq, int) or not isinstance(created, int):
        return None
    kinds = " ".join(map(str, dtypes)) if isinstance(dtypes, list) else str(dtypes)
    what = f"{op} {json.dumps(sizes)} {kinds}".strip()
    return Collective(seq=seq, what=what, created_s=created / 1e9)


def last_numbers(flights: Mapping[int, Flight]) -> dict[int, int]:
    """The number of the last collective that each rank has entered."""
    return {rank: flight[-1].seq for rank, flight in flights.items() if flight}


def _by_number(
    flights: Mapping[int, Flight],
) -> tuple[list[int], dict[int, dict[int, Collective]]]:
    """The numbers of the collectives that all ranks have, and those of each rank by number."""
    by_rank = {rank: {c.seq: c for c in flight} for rank, flight in flights.items()}
    return sorted(set.intersection(*map(set, by_rank.values()))) if by_rank else [], by_rank


def find_desync(flights: Mapping[int, Flight]) -> Desync | None:
    """The first number under which the ranks ran different things; None if they agree."""
    common, by_rank = _by_number(flights)
    for index, seq in enumerate(common):
        seen = {rank: told[seq].what for rank, told in by_rank.items()}
        if len(set(seen.values())) > 1:
            first = next(iter(by_rank.values()))
            before = [first[number].what for number in common[:index]]
            return Desync(seq=seq, rank=_who_left(before, seen), seen=seen)
    return None


def _who_left(before: Sequence[str], kinds: Mapping[int, str]) -> int | None:
    """The rank that did not do what came next in the pattern of earlier steps.

    With three ranks or more the odd one out is known without a pattern.
    """
    counts = Counter(kinds.values())
    odd = [rank for rank, kind in kinds.items() if counts[kind] == 1]
    if len(kinds) > 2 and len(odd) == 1:
        return odd[0]
    wanted = _expected(before)
    wrong = [rank for rank, kind in kinds.items() if kind != wanted]
    return wrong[0] if wanted is not None and len(wrong) == 1 else None


def left_the_pattern(flight: Flight) -> bool:
    """Did this rank, by its own record, do something lately that its earlier steps did not?

    What it had done before, and not in most steps, belongs to none of them: an evaluation, a save,
    a step that is computed twice.
    """
    kinds = [collective.what for collective in flight]
    counts = Counter(kinds)
    often = max(counts.values(), default=0)
    seldom = {kind for kind in kinds[:-_RECENT] if 2 * counts[kind] <= often + 1}
    kinds = [kind for kind in kinds if kind not in seldom]
    recent = range(max(1, len(kinds) - _RECENT), len(kinds))
    expected = {index: _expected(kinds[:index]) for index in recent}
    return any(wanted is not None and kinds[i] != wanted for i, wanted in expected.items())


def _expected(before: Sequence[str]) -> str | None:
    """What followed the last time that the longest possible recent context occurred."""
    for length in range(min(_CONTEXT, len(before) - 1), 0, -1):
        context = list(before[-length:])
        for end in range(len(before) - 1, length - 1, -1):
            if list(before[end - length : end]) == context:
                return before[end]
    return None


# How a note begins that blames the machine for a late rank, and not the rank.
SHORT_OF_CPUS = "short of CPUs"

_LONGEST_PERIOD = 256
# A lag that every step has, of this size at least, is no scheduling noise.
_LAG_S, _LAG_SHARE, _SAME_SHARE, _FEWEST_STEPS = 0.010, 0.05, 0.8, 12


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


def find_straggler(flights: Mapping[int, Flight], where: Callable[[int], str]) -> Straggler | None:
    """Who enters the collectives later than all others in nearly every step.

    `where` gives the node of a rank. The node is named where all of its ranks are late together,
    one rank otherwise. Needs at least 12 whole steps; a step is one period of the pattern of
    collectives.
    """
    import numpy as np

    common, by_rank = _by_number(flights)
    ranks = list(by_rank)
    steps = _steps([by_rank[ranks[0]][seq].what for seq in common])
    if len(steps) < _FEWEST_STEPS:
        return None
    places = range(len(ranks))
    nodes: dict[str, list[int]] = {}
    for place in places:
        nodes.setdefault(where(ranks[place]), []).append(place)
    entered = np.array([[by_rank[rank][seq].created_s for rank in ranks] for seq in common])
    # Against the first rank at each collective, by step, collective of the step, and rank.
    late = np.array([(entered - entered.min(axis=1, keepdims=True))[step] for step in steps])
    lags = late.max(axis=1)
    if len(nodes) > 1:
        # What a rank is late by at every collective of a step is how far its clock is ahead, since
        # who is waited for goes on together with the others.
        lags -= late.min(axis=1)
    step_s = float(entered[steps[0]][-1, 0] - entered[steps[-1]][0, 0]) / len(steps)
    # Of a node that is late even the first rank is.
    whole = [*nodes.values()] if 1 < len(nodes) < len(ranks) else []
    for units in filter(None, (whole, [[place] for place in places])):
        firsts = np.array([lags[:, unit].min(axis=1) for unit in units])
        latest = firsts.argmax(axis=0).tolist()
        unit = statistics.mode(latest)
        lag_s = float(np.median(firsts[unit]))
        steady = latest.count(unit) >= _SAME_SHARE * len(steps)
        # No noise: one is the latest in nearly all steps, and by more than scheduling makes it.
        if steady and lag_s >= max(_LAG_S, _LAG_SHARE * step_s):
            found = tuple(ranks[place] for place in units[unit])
            return Straggler(
                late=found,
                ranks=len(ranks),
                lag_s=lag_s,
                steps=len(steps),
                step_s=step_s,
                node=where(found[0]),
            )
    return None


def _steps(kinds: Sequence[str]) -> list[slice]:
    """Where each whole step is among the collectives that all ranks have, the last one first.

    From the end: the beginning of a run is not periodic. What stands between two steps, such as a
    step computed a second time, is passed over.
    """
    found = _pattern(kinds)
    if found is None:
        return []
    period, end = found
    pattern, steps = kinds[end - period : end], []
    while end >= period:
        whole = kinds[end - period : end] == pattern
        if whole:
            steps.append(slice(end - period, end))
        end -= period if whole else 1
    return steps


def _pattern(kinds: Sequence[str]) -> tuple[int, int] | None:
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
