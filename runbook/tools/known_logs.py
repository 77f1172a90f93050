"""What the logs of public trainers look like, so that nobody has to describe them.

Their lines are in `configs/trainers/known_logs.yaml`: a new trainer is one entry there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pydantic import TypeAdapter

from runbook.files import shipped_data
from runbook.records.measurement import Record
from runbook.records.own_trainer import PACE, LogMap


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
