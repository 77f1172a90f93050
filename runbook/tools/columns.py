"""Anybody's CSV as columns of numbers; what is wrong is named by file, line and column."""

from __future__ import annotations

import csv
import hashlib
import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from runbook.errors import UsageError, did_you_mean
from runbook.read.rows import is_number
from runbook.stats.decision import FloatArray

MOST_PROBLEMS = 10
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
        """Raise UsageError if a column `step` does not rise: rows of two runs in one file."""
        if not self.has("step"):
            return
        steps = self.numbers("step", above=-1.0)
        falls = np.flatnonzero(np.diff(steps) <= 0)
        if falls.size:
            before, after = steps[falls[0]], steps[falls[0] + 1]
            where = f"{self.name} line {self.lines[int(falls[0]) + 1]}, column step"
            raise UsageError(
                f"{where}: {after:g} after {before:g}; allowed: rising steps of one run",
                hint="two runs in one file are no longer run: give the rows of one",
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
        data = path.read_bytes()
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
