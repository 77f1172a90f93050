"""What the logs of public trainers look like, so that nobody has to describe them.

Their lines are in `configs/trainers/known_logs.yaml`: a new trainer is one entry there. A guess is
only as good as the rows that it finds: `guess` holds it against the log before anybody is asked to
believe it.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from pydantic import TypeAdapter

from runbook.errors import UsageError
from runbook.files import LARGEST_TABLE_BYTES, read_bytes, shipped_data
from runbook.folder import CONSOLE_LOG, OWN_FOLDER
from runbook.folder.launch.own_log import RowReader, document_in, lines_of
from runbook.records.measurement import Record
from runbook.records.own_trainer import CONSOLE, OUT, PACE, LogMap
from runbook.text import in_one_line


class KnownLog(Record):
    """Lines on the console of one public trainer; the fields are those of the file."""

    trainer: str
    pattern: str
    advice: str


_DATA = shipped_data("trainers/known_logs")
# What columns are called elsewhere; the first that is there is taken.
NAMES: Mapping[str, Sequence[str]] = _DATA["columns"]
KNOWN = TypeAdapter(tuple[KnownLog, ...]).validate_python(_DATA["trainers"])
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|inf"
_STEP = r"(?i)\b(?:step|iter(?:ation)?|update)\b\W{0,8}(?P<step>\d+)"
_LOSS = rf".*?\bloss\b[\s:=]*(?P<loss>{_NUMBER})"
_MS = rf".*?(?P<dt_ms>{_NUMBER}) ?ms\b"
# Of a trainer that nobody knows: a step, a loss, and with luck how long the step took.
_UNKNOWN = (_STEP + _LOSS + _MS, _STEP + _LOSS)


def by_pattern() -> Iterator[tuple[LogMap, str]]:
    """Maps of consoles with whose lines they are, the surest first; "" for nobody's."""
    for known in KNOWN:
        yield LogMap(pattern=known.pattern), known.trainer
    for pattern in _UNKNOWN:
        yield LogMap(pattern=pattern), ""


def by_columns(path: str, fields: Sequence[str]) -> LogMap | None:
    """The map of a table, or of documents in lines; None where no column is a loss."""
    columns: dict[str, str] = {}
    for ours, theirs in NAMES.items():
        named = next((name for name in theirs if name in fields), None)
        if named and not (ours in PACE and set(PACE) & columns.keys()):
            columns[ours] = named
    return LogMap(path=path, columns=columns) if "loss" in columns else None


def whose_columns(path: str, fields: Sequence[str]) -> str:
    """Lightning's CSVLogger writes metrics.csv, with the epoch before or after the step."""
    is_lightning = path.endswith("/metrics.csv") and {"epoch", "step"} <= set(fields)
    return "Lightning" if is_lightning else ""


def advice() -> str:
    """What each known trainer has to be told, or it writes a row for many steps."""
    return "; ".join(f"{known.trainer}: {known.advice}" for known in KNOWN)


# Columns of a table that has no loss, as many as a message shows.
_SHOWN_FIELDS = 8
_FEWEST = 3


def guess(run_dir: Path, *, steps: int) -> tuple[LogMap, str]:
    """The map of the log that a finished launch of so many steps left, and what to say of it.

    Raises UsageError that says where it looked, and what a log needs.
    """
    looked: list[str] = []
    for log, path, whose in _candidates(run_dir, looked):
        lines = lines_of(read_bytes(path, LARGEST_TABLE_BYTES))[0]
        rows = tuple(RowReader(log).take_all(lines))
        if rows or not whose:
            said = f"{log.path}: {len(rows)} rows"
            looked.append(f"{said}, as {whose} writes them" if whose else said)
        if len(rows) < _FEWEST:
            continue
        if any(b["step"] <= a["step"] for a, b in pairwise(rows)):
            looked[-1] += ", but its steps do not rise (does every rank write them?)"
            continue
        every = 1 if "step" in log.names else max(1, round(steps / len(rows)))
        return log.model_copy(update={"every": every}), looked[-1]
    raise UsageError(
        f"no log with a loss was found in {run_dir} "
        f"({'; '.join(dict.fromkeys(looked)) or 'nothing was written'})",
        hint=f"let it write a .csv or .jsonl with step and loss below {OUT}, or print such lines, "
        f"for every step ({advice()}); docs/your-trainer.md has an adapter of 30 lines",
    )


def _candidates(run_dir: Path, looked: list[str]) -> Iterator[tuple[LogMap, Path, str]]:
    """Maps that may fit, with whose logs they are: tables, JSON lines, what the console shows.

    Why a table that is there is not taken, is added to `looked`.
    """
    own = run_dir / OWN_FOLDER
    for suffix, read in (("csv", _header), ("jsonl", _fields)):
        for path in sorted(own.rglob(f"*.{suffix}")):
            fields, below = read(path), path.relative_to(own)
            # Only the name is sure to be the same in the next launch.
            name = f"{OUT}/{below}" if len(below.parts) == 1 else f"{OUT}/**/{below.name}"
            if log := by_columns(name, fields):
                yield log, path, whose_columns(name, fields)
            else:
                looked.append(f"{below}: no loss among its columns ({_shown(fields)}")
    console = run_dir / CONSOLE_LOG
    known = [(log, console, whose) for log, whose in by_pattern()]
    yield from (one for one in known if one[2])
    if log := by_columns(CONSOLE, _fields(console)):
        yield log, console, ""
    yield from (one for one in known if not one[2])


def _shown(fields: Sequence[str]) -> str:
    shown = in_one_line(", ".join(fields[:_SHOWN_FIELDS])) or "none"
    other = next((mark for mark in ";\t|" if fields and mark in fields[0]), "")
    return f"{shown})" + (f", separated by {other!r} and not by commas" if other else "")


def _header(path: Path) -> list[str]:
    first = path.read_text("utf-8", "replace").partition("\n")[0]
    return [cell.strip() for cell in next(csv.reader([first]), [])]


def _fields(path: Path) -> list[str]:
    """The fields of the documents in a file's lines, those of lines with a loss before others."""
    found: dict[str, None] = {}
    for line in lines_of(read_bytes(path, LARGEST_TABLE_BYTES))[0]:
        fields = document_in(line.decode("utf-8", "replace"))
        if any(name in fields for name in NAMES["loss"]):
            return list(fields)
        found |= dict.fromkeys(fields)
    return list(found)
