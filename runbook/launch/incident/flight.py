"""The ranks' flight records: which collective each one entered, when, and where they part.

A record is written by the rank itself (SIGUSR2, every bad end, the end of a run). Ranks of one
launch run the same collectives in the same order; that alone tells a desynchronised rank (same
number, other operation or shape) from one that never came and from one that comes late.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Never

from nsa.contract import FLIGHT_COLUMNS, FLIGHTS, NCCL_FLIGHTS, flight_row

_LARGEST_BYTES = 64 << 20
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
    """One collective as one rank saw it."""

    seq: int
    op: str
    sizes: str
    created_s: float

    @property
    def kind(self) -> tuple[str, str]:
        """What must be equal on all ranks."""
        return self.op, self.sizes

    def text(self) -> str:
        """`all_reduce [[1000]] Float`."""
        return f"{self.op} {self.sizes}"


@dataclass(frozen=True, kw_only=True)
class Flight:
    """The last collectives of one rank, oldest first."""

    rank: int
    path: Path
    collectives: tuple[Collective, ...]


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
        try:
            document = json.loads(_bytes(path))
        except (ValueError, RecursionError):
            continue
        if isinstance(document, dict) and document.get("token") == token:
            entries = document.get("entries")
            flights[rank] = _flight(rank, path, entries if isinstance(entries, list) else [])
    for rank, path in NCCL_FLIGHTS.found_in(run_dir).items():
        # An aborted rank has no record of its own.
        rows = None if rank in flights else read_nccl_rows(_bytes(path))
        if rows is not None:
            flights[rank] = _flight(rank, path, rows)
    return dict(sorted(flights.items()))


def _bytes(path: Path) -> bytes:
    """The file's bytes; none of one that cannot be read or is far too large."""
    try:
        return b"" if path.stat().st_size > _LARGEST_BYTES else path.read_bytes()
    except OSError:
        return b""


def _flight(rank: int, path: Path, rows: Sequence[Any]) -> Flight:
    read = tuple(c for c in map(_collective, rows) if c is not None)
    return Flight(rank=rank, path=path, collectives=read)


def _collective(row: Any) -> Collective | None:
    if not isinstance(row, list) or len(row) < _READ:
        return None
    seq, op, sizes, dtypes, created = row[:_READ]
    if not isinstance(seq, int) or not isinstance(created, int):
        return None
    kinds = " ".join(map(str, dtypes)) if isinstance(dtypes, list) else str(dtypes)
    text = f"{json.dumps(sizes)} {kinds}".strip()
    return Collective(seq=seq, op=str(op), sizes=text, created_s=created / 1e9)


def last_numbers(flights: Mapping[int, Flight]) -> dict[int, int]:
    """The number of the last collective that each rank has entered."""
    return {r: f.collectives[-1].seq for r, f in flights.items() if f.collectives}


def find_desync(flights: Mapping[int, Flight]) -> Desync | None:
    """The first number under which the ranks ran different things; None if they agree."""
    by_rank = {r: {c.seq: c for c in f.collectives} for r, f in flights.items()}
    if len(by_rank) < 2:
        return None
    common = sorted(set.intersection(*(set(seen) for seen in by_rank.values())))
    for index, seq in enumerate(common):
        kinds = {rank: seen[seq].kind for rank, seen in by_rank.items()}
        if len(set(kinds.values())) > 1:
            first = next(iter(by_rank.values()))
            before = [first[number].kind for number in common[:index]]
            seen = {rank: by_rank[rank][seq].text() for rank in by_rank}
            return Desync(seq=seq, rank=_who_left(before, kinds), seen=seen)
    return None


def _who_left(
    before: Sequence[tuple[str, str]], kinds: Mapping[int, tuple[str, str]]
) -> int | None:
    """The rank that did not do what came next in the pattern of earlier steps.

    With three ranks or more the odd one out is known without a pattern.
    """
    counts = {kind: list(kinds.values()).count(kind) for kind in kinds.values()}
    odd = [rank for rank, kind in kinds.items() if counts[kind] == 1]
    if len(kinds) > 2 and len(odd) == 1:
        return odd[0]
    wanted = _expected(before)
    wrong = [rank for rank, kind in kinds.items() if kind != wanted]
    return wrong[0] if wanted is not None and len(wrong) == 1 else None


def left_the_pattern(flight: Flight) -> bool:
    """Did this rank, by its own record, do something lately that its earlier steps did not?"""
    kinds = [collective.kind for collective in flight.collectives]
    recent = range(max(1, len(kinds) - _RECENT), len(kinds))
    expected = {index: _expected(kinds[:index]) for index in recent}
    return any(wanted is not None and kinds[i] != wanted for i, wanted in expected.items())


def _expected(before: Sequence[tuple[str, str]]) -> tuple[str, str] | None:
    """What followed the last time that the longest possible recent context occurred."""
    for length in range(min(_CONTEXT, len(before) - 1), 0, -1):
        context = list(before[-length:])
        for end in range(len(before) - 1, length - 1, -1):
            if list(before[end - length : end]) == context:
                return before[end]
    return None
