"""Where the rows of a trainer of one's own are: its tables, its JSON lines, or what it prints.

Lines of public trainers are in `configs/trainers/known_logs.yaml`: a new one is one entry there.
What is found is held against the log before anybody is asked to believe it.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from pydantic import TypeAdapter

from runbook.errors import UsageError
from runbook.files import LARGEST_TABLE_BYTES, page, read_bytes, shipped_data
from runbook.folder import CONSOLE_LOG, OWN_FOLDER
from runbook.folder.launch.own_log import Row, RowReader, document_in, lines_of
from runbook.records.measurement import Record
from runbook.records.own_trainer import CONSOLE, OUT, PACE, LogMap
from runbook.text import in_one_line, listed, without_colors


class KnownLog(Record):
    """Lines on the console of one public trainer; the fields are those of the file."""

    trainer: str
    pattern: str


_DATA = shipped_data("trainers/known_logs")
# What columns are called elsewhere; the first that is there is taken.
NAMES: Mapping[str, Sequence[str]] = _DATA["columns"]
KNOWN = TypeAdapter(tuple[KnownLog, ...]).validate_python(_DATA["trainers"])
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|inf"
_STEP = r"(?i)\b(?:step|iter(?:ation)?|update)\b\W{0,8}(?P<step>\d+)"
# The step as `[5/30]` or `5/30`; not of a date, nor of a progress bar, which is drawn over.
_OF = r"(?i)^(?!.*\d:\d\d<).*?{}(?P<step>\d+) */ *\d+\b(?![/.:])"
_NO_TRAINING = r"(?<!val.)(?<!test.)(?<!validation.)"
_NAME = rf"{_NO_TRAINING}\b(?:(?:train(?:ing)?|lm|avg|mean|total)_)?loss\b"
_LOSS = rf".*?{_NAME}[\s:=]*(?P<loss>{_NUMBER})"
_MS = rf".*?(?P<dt_ms>{_NUMBER}) ?ms\b"
# Of a trainer that nobody knows: a step, a loss, and with luck how long the step took.
_STEPS = (_STEP, _OF.format(r"\[ *"), _OF.format(r"(?<![\w./:-])"))
_UNKNOWN = tuple(step + _LOSS + pace for step in _STEPS for pace in (_MS, ""))
# Without a step that can be taken: one row for each step, and the rows are counted.
_COUNTED = rf"(?i)^(?!.*\d:\d\d<){_LOSS}"
# What stands behind a step, and what says that it is one of the whole run.
_TOTAL = re.compile(r" */ *(\d+)")
_NAMES_STEP, _NAMES_EPOCH = re.compile(r"(?i)\b(?:step|iter|update)"), re.compile(r"(?i)\bepoch")


def by_pattern() -> Iterator[tuple[LogMap, str]]:
    """Maps of consoles with whose lines they are, the surest first; "" for nobody's."""
    for known in KNOWN:
        yield LogMap(pattern=known.pattern), known.trainer
    for pattern in (*_UNKNOWN, _COUNTED):
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


# Columns of a table that has no loss, as many as a message shows.
_SHOWN_FIELDS = 8
_FEWEST = 3
# What a log needs, for who has to write one or to describe the own one.
_NEEDS = (
    f"a line such as `step 12/300 loss 4.66` is read, and so is a .csv or .jsonl below {OUT} with "
    r"step and loss, for each step or every few; any other line by --pattern (log.pattern of a "
    r"profile), such as 'at (?P<step>\d+): cost (?P<loss>\S+)'; see "
)


def guess(run_dir: Path, *, steps: int, pattern: str = "") -> tuple[LogMap, str]:
    """The map of the log that a finished launch of so many steps left, and what to say of it.

    A `pattern` that a person gave is the only one that is tried. Raises UsageError that says where
    it looked, and what a log needs.
    """
    looked: dict[str, str] = {}
    given = [(LogMap(pattern=pattern), run_dir / CONSOLE_LOG, "")] if pattern else None
    for log, path, whose in given or _candidates(run_dir, looked):
        lines = lines_of(read_bytes(path, LARGEST_TABLE_BYTES))[0]
        rows = tuple(RowReader(log).take_all(lines))
        none = f"{log.path}: 0 rows"
        said = f"{log.path}: {len(rows)} rows" + (f", as {whose} writes them" if whose else "")
        odd = _why_not(log, rows, lines, steps)
        if (rows or not whose) and looked.get(whose or log.path, none) == none:
            looked[whose or log.path] = f"{said}, but {odd}" if odd and rows else said
        if len(rows) >= _FEWEST and not odd:
            every = 1 if "step" in log.names else max(1, round(steps / len(rows)))
            return log.model_copy(update={"every": every}), said
    found = "; ".join(looked.values()) or "nothing was written"
    raise UsageError(
        f"no log with a loss was found in {run_dir} ({found})",
        hint=_NEEDS + page("your-trainer"),
    )


def _why_not(log: LogMap, rows: Sequence[Row], lines: Sequence[bytes], steps: int) -> str:
    """Why rows of a log are not those of the steps that were asked for; empty if they are.

    Of `N/M`, N is a step of the whole run where M is the number that was asked for: others count
    the batches of an epoch, or samples, and begin anew.
    """
    if log.pattern == _COUNTED:
        no = "no step that goes on is told in them, and they are not one for each of the"
        return "" if len(rows) == steps else f"{no} {steps} steps"
    if any(b["step"] <= a["step"] for a, b in pairwise(rows)):
        return "its steps do not rise (does every rank write them, or each epoch begin anew?)"
    if log.pattern in _UNKNOWN and (total := _total(log.pattern, lines)) not in (None, steps):
        return f"its steps are counted to {total}, and {steps} were asked for (of an epoch?)"
    return ""


def _total(pattern: str, lines: Sequence[bytes]) -> int | None:
    """The M of lines that tell `N/M`; None where there is none, or a step of a longer run."""
    for line in lines:
        text = without_colors(line.decode("utf-8", "replace"))
        found = re.search(pattern, text)
        if found and (total := _TOTAL.match(text, found.end("step"))):
            names_step = _NAMES_STEP.search(text, 0, found.start("step"))
            return None if names_step and not _NAMES_EPOCH.search(text) else int(total[1])
    return None


def _candidates(run_dir: Path, looked: dict[str, str]) -> Iterator[tuple[LogMap, Path, str]]:
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
                shown = in_one_line(listed(fields, _SHOWN_FIELDS)) or "none"
                looked[name] = f"{below}: no loss among its columns ({shown})"
    console = run_dir / CONSOLE_LOG
    known = [(log, console, whose) for log, whose in by_pattern()]
    yield from (one for one in known if one[2])
    if log := by_columns(CONSOLE, _fields(console)):
        yield log, console, ""
    yield from (one for one in known if not one[2])


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
