"""One number through the runs: which are on one line, and how each stands to those before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from runbook.tools.history.runs import MetricRow, RunRow

# The lowest to the highest of eight levels, where the terminal shows them and where it does not.
_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII = "_.-~=+*#"


@dataclass(frozen=True, kw_only=True)
class Trend:
    """A metric's comparable values, oldest first: the same profile, settings, work and devices.

    `path` is the file that a measurement is from, since every launch may give one of that name; a
    check has one number a run, whatever files it is from.
    """

    name: str
    unit: str
    on_what: str
    line: str
    rows: tuple[MetricRow, ...]
    path: str = ""

    @property
    def title(self) -> str:
        """What is on the line: `baseline/loss: profile cpu, 2 x AMD EPYC, run1/training.csv`."""
        return ", ".join(text for text in (f"{self.name}: {self.on_what}", self.path) if text)

    @property
    def numbers(self) -> tuple[float, ...]:
        """The values of the runs that have one."""
        return tuple(row.number for row in self.rows if row.number is not None)

    def changes(self) -> list[tuple[float, int] | None]:
        """For each row: the change against the median of the earlier ones as a share, and of how
        many; None without a number, an earlier one, or a median to divide by."""
        found: list[tuple[float, int] | None] = []
        before: list[float] = []
        for row in self.rows:
            middle = median(before) if before else 0.0
            known = row.number is not None and middle != 0.0
            found.append((row.number / middle - 1, len(before)) if known and row.number else None)
            before += [] if row.number is None else [row.number]
        return found


@dataclass(frozen=True, kw_only=True)
class RunsPage:
    """What a page about all runs shows: the runs oldest first, and every trend of two or more.

    `links` has, by folder, where its report lies as the page would name it.
    """

    runs: tuple[RunRow, ...]
    trends: tuple[Trend, ...]
    links: dict[str, str]


def trends(rows: Sequence[MetricRow]) -> list[Trend]:
    """The rows of one or more metrics, split into lines; the one with the newest run comes last."""
    lines: dict[tuple[str, str, str], list[MetricRow]] = {}
    for row in rows:
        lines.setdefault((row.name, row.line, _launch_of(row)), []).append(row)
    found = [
        Trend(
            name=name,
            unit=next((row.unit for row in reversed(kept) if row.number is not None), ""),
            on_what=kept[-1].on_what,
            line=line,
            rows=tuple(kept),
            path=path,
        )
        for (name, line, path), kept in lines.items()
    ]
    return sorted(found, key=lambda trend: (trend.name, trend.rows[-1].started_at, trend.path))


def _launch_of(row: MetricRow) -> str:
    """The file of a measurement, named `phase/measurement`; nothing for a check."""
    return row.path if "/" in row.name else ""


def sparkline(values: Sequence[float], *, plain: bool = False) -> str:
    """A character for each value, low to high; `plain` uses ASCII. Equal values are in the middle.

    An empty text for fewer than two values.
    """
    marks = _ASCII if plain else _BLOCKS
    if len(values) < 2:
        return ""
    halves = [value / 2 for value in values]  # the width of two huge ones would be infinite
    low, high = min(halves), max(halves)
    width = high - low
    if not width:
        return marks[len(marks) // 2] * len(values)
    most = len(marks) - 1
    return "".join(marks[round((half - low) / width * most)] for half in halves)
