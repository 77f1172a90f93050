"""The decisions as questions to anybody's CSV file: which columns each needs, how it is asked.

What is wrong with a file is named by file, line and column.
"""

from __future__ import annotations

import csv
import hashlib
import io
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from runbook.errors import UsageError, did_you_mean
from runbook.files import LARGEST_TABLE_BYTES, read_given
from runbook.folder.launch.rows import is_number
from runbook.stats.arms import judge_rounds, rounds_of
from runbook.stats.decision import Decision, FloatArray
from runbook.stats.launches import meets_target, scaling
from runbook.stats.memory import memory_plateau
from runbook.stats.pairs import faster, non_inferiority
from runbook.stats.plans import BUCKET_PLAN, FASTER_PLAN, FUSED_PLAN, SCALING_PLAN
from runbook.stats.steady import steady

if TYPE_CHECKING:
    import pandas as pd

MOST_PROBLEMS = 10
# Measured times cannot be equal in so many rows.
MEASURED = 10
LONG = "needed: arm,block,value, or a training.csv with arm,block,tokens,dt_s"
# Options of a question by name; one that was not given is absent, and has its default.
Given = Mapping[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of one file. `lines[i]` is the line of row i in the file, counted from 1."""

    name: str
    sha256: str
    header: tuple[str, ...]
    rows: list[list[str]]
    lines: list[int]

    def has(self, *columns: str) -> bool:
        """Whether all these columns are there."""
        return set(columns) <= set(self.header)

    def need(self, *columns: str, hint: str = "") -> None:
        """Raise UsageError, naming every missing column with the nearest one that is there."""
        missing = [
            f"{self.name} line 1: no column {column!r}{did_you_mean(column, self.header)}"
            for column in columns
            if column not in self.header
        ]
        if missing:
            there = f"columns there: {', '.join(self.header)}"
            raise UsageError(missing, hint=f"{there}; {hint}" if hint else there)

    def text(self, column: str) -> list[str]:
        """A column as it stands. Raises UsageError for empty cells."""
        return self._cells(column, "a name", lambda cell: cell.strip() or None)

    def numbers(self, column: str, *, above: float = 0.0) -> FloatArray:
        """A column as finite numbers greater than `above`. Raises UsageError for other cells."""

        def read(cell: str) -> float | None:
            value = float(cell) if is_number(cell) else math.nan
            return value if math.isfinite(value) and value > above else None

        return np.array(self._cells(column, f"finite numbers above {above:g}", read))

    def one_run(self) -> None:
        """Raise UsageError unless the rows are those of one run, whole, with one workload.

        The column `step`, if there is one, has to rise by the same, and `tokens` may not change.
        """
        if self.has("step"):
            self._whole_run(self.steps())
        if not self.has("tokens"):
            return
        tokens = self.numbers("tokens")
        changed = np.flatnonzero(tokens != tokens[0])
        if changed.size:
            where = f"{self.name} line {self.lines[int(changed[0])]}, column tokens"
            raise UsageError(
                f"{where}: {tokens[changed[0]]:g} after {tokens[0]:g}; allowed: the same tokens"
                " in every step",
                hint="steps of two workloads cannot be compared: give the rows of one",
            )

    def steps(self) -> FloatArray:
        """The column `step`. Raises UsageError for cells that are no step's number."""

        def read(cell: str) -> float | None:
            value = float(cell) if is_number(cell) else math.nan
            return value if value >= 0 and value.is_integer() else None

        return np.array(self._cells("step", "whole numbers from 0", read))

    def _whole_run(self, steps: FloatArray) -> None:
        rises = np.diff(steps)
        falls, usual = np.flatnonzero(rises <= 0), float(np.median(rises)) if rises.size else 1.0
        gaps = np.flatnonzero(rises > usual)
        odd = falls if falls.size else gaps
        if not odd.size:
            return
        before, after = steps[odd[0]], steps[odd[0] + 1]
        where = f"{self.name} line {self.lines[int(odd[0]) + 1]}, column step"
        raise UsageError(
            f"{where}: {after:g} after {before:g}; allowed: rising steps of one run"
            + ("" if falls.size else ", none missing"),
            hint="two runs in one file are no longer run: give the rows of one"
            if falls.size
            else "what happened in the missing steps cannot be known: give rows without a gap",
        )

    def _cells(self, column: str, allowed: str, read: Callable[[str], T | None]) -> list[T]:
        """Every cell as `read` gives it; the first cells that it refuses are named by line."""
        at = self.header.index(column)
        values = [read(row[at]) for row in self.rows]
        problems = [
            f"{self.name} line {line}, column {column}: {row[at]!r}; allowed: {allowed}"
            for value, row, line in zip(values, self.rows, self.lines, strict=True)
            if value is None
        ]
        if len(problems) > MOST_PROBLEMS:
            problems[MOST_PROBLEMS:] = [f"and {len(problems) - MOST_PROBLEMS} more"]
        if problems:
            raise UsageError(problems)
        return [value for value in values if value is not None]


def read_table(path: Path) -> Table:
    """Read a CSV file with a header; quoted cells may hold commas and line ends.

    Raises:
        UsageError: no such file, not text, empty, no header, a column twice, rows of another
            length than the header, a last line without its end.
    """
    data, text = _text_of(path)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    header: tuple[str, ...] = ()
    rows, lines, problems = [], [], []
    try:
        for row in reader:
            if not any(cell.strip() for cell in row):
                continue
            if not header:
                header = tuple(cell.strip() for cell in row)
                problems.extend(_header_problems(path, header))
            elif len(row) != len(header):
                sizes = f"{len(row)} cell(s), the header has {len(header)}"
                problems.append(f"{path} line {reader.line_num}: {sizes}")
            else:
                rows.append(row)
                lines.append(reader.line_num)
    except csv.Error as error:
        problems.append(f"{path} line {reader.line_num}: {error}")
    else:
        # What was cut off cannot be seen from the number: 10 may be the beginning of 105.3.
        if text and not text.endswith(("\n", "\r")):
            problems.append(
                f"{path} line {reader.line_num}: does not end in a newline, so it may be cut off;"
                " add the newline if the row is whole"
            )
    if not header:
        problems = [f"{path}: empty; needed: a header line and rows"]
    elif not rows and not problems:
        problems.append(f"{path}: a header but no rows")
    if problems:
        raise UsageError(problems[: MOST_PROBLEMS + 1])
    digest = hashlib.sha256(data).hexdigest()
    return Table(name=str(path), sha256=digest, header=header, rows=rows, lines=lines)


def _text_of(path: Path) -> tuple[bytes, str]:
    try:
        data = read_given(path, pipe=True, most=LARGEST_TABLE_BYTES)
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text (byte {error.start})") from error
    return data, text


def _header_problems(path: Path, header: tuple[str, ...]) -> list[str]:
    twice = sorted({name for name in header if header.count(name) > 1})
    problems = [f"{path} line 1: column {name!r} is there more than once" for name in twice]
    if all(map(is_number, header)):
        problems.append(f"{path} line 1: {','.join(header)} are numbers; needed: a header line")
    return problems


def _best_arm(table: Table, given: Given) -> Decision:
    arms, values = rounds_of(_arms(table))
    return judge_rounds(arms, values, error=given.get("error", BUCKET_PLAN.error))


def _arms(table: Table) -> pd.DataFrame:
    """Columns arm, block, value; from a training.csv: tokens / time of each block."""
    import pandas as pd

    def frame(*numbers: str) -> pd.DataFrame:
        names = {"arm": table.text("arm"), "block": _maybe_numbers(table.text("block"))}
        return pd.DataFrame(names | {name: table.numbers(name) for name in numbers})

    if table.has("arm", "block", "value"):
        return frame("value")
    if not table.has("tokens", "dt_s"):
        table.need("arm", "block", "value", hint=LONG)
    table.need("arm", "block", "tokens", "dt_s", hint=LONG)
    table.one_run()
    rows = frame("tokens", "dt_s")
    if table.has("warmup"):
        rows = rows[table.numbers("warmup", above=-1.0) == 0]
    sums = rows.groupby(["arm", "block"], sort=False)[["tokens", "dt_s"]].sum().reset_index()
    return sums.assign(value=sums["tokens"] / sums["dt_s"])[["arm", "block", "value"]]


def _maybe_numbers(cells: list[str]) -> list[float] | list[str]:
    try:
        return [float(cell) for cell in cells]
    except ValueError:
        return cells


def _two(table: Table, names: tuple[str, str], given: Given) -> tuple[FloatArray, FloatArray]:
    """Two paired columns, or the two arms of a long table (`--baseline` is the first)."""
    if table.has(*names):
        return table.numbers(names[0]), table.numbers(names[1])
    if not (table.has("arm", "block") and (table.has("value") or table.has("tokens", "dt_s"))):
        table.need(*names, hint=f"needed: {','.join(names)} (one row per round), or {LONG[8:]}")
    arms, values = rounds_of(_arms(table))
    if len(arms) != 2:
        raise UsageError(f"{table.name}: arms {', '.join(arms)}; exactly two can be compared")
    first = given.get("baseline") or (names[0] if names[0] in arms else "")
    if first not in arms:
        raise UsageError(
            f"no arm {first!r}{did_you_mean(first, arms)}"
            if first
            else f"{table.name} does not say which arm is the baseline; give --baseline ARM",
            hint=f"arms: {', '.join(arms)}",
        )
    at = arms.index(first)
    return values[:, at], values[:, 1 - at]


def _non_inferiority(table: Table, given: Given) -> Decision:
    baseline, variant = _two(table, ("baseline", "variant"), given)
    margin, error = given.get("margin", 0.02), given.get("error", FUSED_PLAN.error)
    return non_inferiority(baseline, variant, margin, error)


def _faster(table: Table, given: Given) -> Decision:
    error = given.get("error", FASTER_PLAN.error)
    if table.has("a", "b"):
        return faster(table.numbers("a"), table.numbers("b"), error)
    base, other = _two(table, ("baseline", "variant"), given)
    return faster(other, base, error)


def _target(table: Table, given: Given) -> Decision:
    table.need("value", hint="needed: one row per launch, its throughput in column value")
    return meets_target(table.numbers("value"), **given)


def _steady(table: Table, given: Given) -> Decision:
    table.need("dt_s", hint="needed: one row per step, its seconds in column dt_s")
    table.one_run()
    times = table.numbers("dt_s")
    if len(times) >= MEASURED and float(np.ptp(times)) == 0.0:
        raise UsageError(
            f"{table.name}: column dt_s is {times[0]:g} in each of {len(times)} rows",
            hint="times that were measured are never all equal",
        )
    return steady(times, **given)


def _memory(table: Table, given: Given) -> Decision:
    table.need("step", "mem_mib", hint="needed: one row per step, memory in column mem_mib")
    table.one_run()
    return memory_plateau(table.steps(), table.numbers("mem_mib"), **given)


def _scaling(table: Table, given: Given) -> Decision:
    table.need("t1", "tN", hint="needed: one row per pair of launches, throughputs t1 and tN")
    options = {"error": SCALING_PLAN.error, **given}
    return scaling(table.numbers("t1"), table.numbers("tN"), options.pop("devices"), **options)


# What the command line asks for, `runbook.cli.questions`, is there when these are called.
QUESTIONS: dict[str, Callable[[Table, Given], Decision]] = {
    "best-arm": _best_arm,
    "non-inferiority": _non_inferiority,
    "target": _target,
    "steady": _steady,
    "memory": _memory,
    "scaling": _scaling,
    "faster": _faster,
}
