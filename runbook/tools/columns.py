"""Anybody's CSV as columns of numbers; what is wrong is named by file, line and column."""

from __future__ import annotations

import csv
import hashlib
import io
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from runbook.errors import UsageError, did_you_mean
from runbook.stats.decision import FloatArray

MOST_PROBLEMS = 10


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
        """A column as it stands.

        Raises:
            UsageError: empty cells.
        """
        at = self.header.index(column)
        cells = [row[at].strip() for row in self.rows]
        empty = [self.lines[index] for index, cell in enumerate(cells) if not cell]
        if empty:
            raise UsageError(self._listing(column, empty, "is empty", "a name"))
        return cells

    def numbers(self, column: str, *, above: float = 0.0) -> FloatArray:
        """A column as finite numbers greater than `above`.

        Raises:
            UsageError: names line and column of the first cells that are something else.
        """
        at = self.header.index(column)
        values, problems = np.empty(len(self.rows)), []
        allowed = f"finite numbers above {above:g}" if math.isfinite(above) else "finite numbers"
        for index, row in enumerate(self.rows):
            try:
                value = float(row[at])
            except ValueError:
                value = math.nan
            values[index] = value
            if not (math.isfinite(value) and value > above):
                where = f"{self.name} line {self.lines[index]}, column {column}"
                problems.append(f"{where}: {row[at]!r}; allowed: {allowed}")
        if problems:
            more = len(problems) - MOST_PROBLEMS
            rest = [f"and {more} more"] if more > 0 else []
            raise UsageError([*problems[:MOST_PROBLEMS], *rest])
        return values

    def _listing(self, column: str, lines: list[int], says: str, allowed: str) -> str:
        shown = ", ".join(map(str, lines[:MOST_PROBLEMS]))
        return f"{self.name} line(s) {shown}, column {column}: {says}; allowed: {allowed}"


def read_table(path: Path) -> Table:
    """Read a CSV file with a header.

    Raises:
        UsageError: no such file, not text, empty, no header, a column twice, rows of another
            length than the header.
    """
    try:
        data = path.read_bytes()
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text (byte {error.start})") from error
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
                continue
            if len(row) != len(header):
                sizes = f"{len(row)} cell(s), the header has {len(header)}"
                problems.append(f"{path} line {reader.line_num}: {sizes}")
                continue
            rows.append(row)
            lines.append(reader.line_num)
    except csv.Error as error:
        problems.append(f"{path} line {reader.line_num}: {error}")
    if not header:
        problems.append(f"{path}: empty; needed: a header line and rows")
    elif not rows and not problems:
        problems.append(f"{path}: a header but no rows")
    if problems:
        raise UsageError(problems[: MOST_PROBLEMS + 1])
    digest = hashlib.sha256(data).hexdigest()
    return Table(name=str(path), sha256=digest, header=header, rows=rows, lines=lines)


def _header_problems(path: Path, header: tuple[str, ...]) -> list[str]:
    twice = sorted({name for name in header if header.count(name) > 1})
    problems = [f"{path} line 1: column {name!r} is there more than once" for name in twice]
    if all(_is_number(cell) for cell in header):
        problems.append(f"{path} line 1: {','.join(header)} are numbers; needed: a header line")
    return problems


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
