"""Plots as inline SVG, drawn from the record's own tables, intervals and curves.

Colours are CSS classes of the page, so that one drawing serves light and dark. Nothing is
fetched, and every text is escaped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from reports.view import one_line
from runbook.records import Check, Series, Table
from runbook.records.measurement import plain_number

_WIDTH = 360.0
_HUGE = 1e100


@dataclass(frozen=True, kw_only=True)
class _Scale:
    """A straight map from data to drawing units."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        width = self.high - self.low  # of two denormal numbers it may be nothing
        share = (value - self.low) / width if width else 0.5
        return round(self.start + share * (self.stop - self.start), 1)


def table_plot(table: Table) -> Markup:
    """Mean and spread of each row, where the table has a column with the word `mean`; else ''.

    A column with the word `stdev` gives the spread; the first column names the rows. Rows without
    a finite mean are left out of the drawing only.
    """
    mean_at = _column(table, "mean")
    if mean_at is None:
        return Markup("")
    stdev_at = _column(table, "stdev")
    rows: list[tuple[str, float, float]] = []
    for row in table.rows:
        mean = _finite(row[mean_at])
        if mean is not None:
            spread = _finite(row[stdev_at]) if stdev_at is not None else None
            rows.append((plain_number(row[0]), mean, spread or 0.0))
    if len(rows) < 2:
        return Markup("")
    return _draw_rows(f"{table.title}: {table.columns[mean_at]}", rows)


def _column(table: Table, word: str) -> int | None:
    for index, name in enumerate(table.columns):
        if index and word in re.split(r"[^a-z]+", name.lower()):
            return index
    return None


def _finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not _drawable(value):
        return None
    return float(value)


def _drawable(value: float) -> bool:
    """Finite, and small enough that differences cannot overflow."""
    return math.isfinite(value) and abs(value) < _HUGE


def _draw_rows(title: str, rows: Sequence[tuple[str, float, float]]) -> Markup:
    longest = max(len(label) for label, _, _ in rows)
    left = min(130.0, 12 + 6.2 * longest)
    x = _fit([m - s for _, m, s in rows] + [m + s for _, m, s in rows], left, _WIDTH - 52)
    height = 26 * len(rows) + 26
    parts = [_axis(x, height - 20)]
    for index, (label, mean, spread) in enumerate(rows):
        y = 16 + 26 * index
        parts.append(_text(left - 8, y + 4, _shorten(label, 19), anchor="end"))
        if spread:
            parts.append(_line(x(mean - spread), y, x(mean + spread), y, "spread"))
        parts.append(Markup('<circle class="dot" cx="{}" cy="{}" r="4"/>').format(x(mean), y))
        parts.append(_text(_WIDTH - 4, y + 4, plain_number(mean), anchor="end"))
    return _svg(title, height, parts)


def interval_plot(check: Check) -> Markup:
    """The value, its interval and the limit on one line; '' where one of the three is missing."""
    measured, limit = check.measurement, _finite(check.limit)
    value = _finite(measured.value) if measured else None
    if measured is None or value is None or limit is None or measured.interval is None:
        return Markup("")
    low, high = measured.interval
    if not (_drawable(low) and _drawable(high)):
        return Markup("")
    x = _fit([low, high, value, limit], 10, _WIDTH - 10)
    parts = [
        _line(10, 26, _WIDTH - 10, 26, "axis"),
        _line(x(low), 26, x(high), 26, "spread"),
        Markup('<circle class="dot" cx="{}" cy="26" r="4"/>').format(x(value)),
        _line(x(limit), 14, x(limit), 38, "limit"),
    ]
    side = "start" if x(limit) < _WIDTH / 2 else "end"
    words = f"limit {check.comparator.value} {plain_number(check.limit)}"
    parts.append(_text(x(limit), 10, words, anchor=side))
    return _svg(f"{check.id} against its limit", 42, parts)


def series_plot(series: Series) -> Markup:
    """The curve with its limit; gaps where a value is not finite.

    A limit far from the curve is named, not drawn: it would flatten the curve into a line.
    """
    points = [(x, y) for x, y in series.points if _drawable(x)]
    finite = [(x, y) for x, y in points if _drawable(y)]
    if len(finite) < 2:
        return Markup("")
    heights = [y for _, y in finite]
    drawn = series.limit is not None and _is_near(series.limit, heights)
    if drawn and series.limit is not None:
        heights.append(series.limit)
    x = _fit([x for x, _ in finite], 46, _WIDTH - 8, pad=0.0)
    y = _fit(heights, 118, 18)
    parts = [_line(46, 118, _WIDTH - 8, 118, "axis")]
    for value in (min(heights), max(heights)):
        parts.append(_line(46, y(value), _WIDTH - 8, y(value), "grid"))
        parts.append(_text(42, y(value) + 4, plain_number(value), anchor="end"))
    if drawn and series.limit is not None:
        parts.append(_line(46, y(series.limit), _WIDTH - 8, y(series.limit), "limit"))
    parts.append(Markup('<path class="curve" d="{}"/>').format(_path(points, x, y)))
    first, last = finite[0][0], finite[-1][0]
    parts.append(_text(46, 134, plain_number(first), anchor="start"))
    parts.append(_text((46 + _WIDTH) / 2, 134, series.x_label, anchor="middle"))
    parts.append(_text(_WIDTH - 8, 134, plain_number(last), anchor="end"))
    unit = f" ({series.unit})" if series.unit else ""
    limit = f", limit {plain_number(series.limit)}" if series.limit is not None else ""
    return _svg(f"{series.name}{unit}{limit}", 140, parts)


def _is_near(limit: float, heights: Sequence[float]) -> bool:
    low, high = min(heights), max(heights)
    room = 2 * (high - low)
    return low - room <= limit <= high + room


def _path(points: Sequence[tuple[float, float]], x: _Scale, y: _Scale) -> str:
    words: list[str] = []
    pen = "M"
    for step, value in points:
        if _drawable(value):
            words.append(f"{pen}{x(step)} {y(value)}")
            pen = "L"
        else:
            pen = "M"
    return "".join(words)


def _fit(values: Sequence[float], start: float, stop: float, pad: float = 0.08) -> _Scale:
    low, high = min(values), max(values)
    span = (high - low) or abs(high) or 1.0
    return _Scale(low=low - pad * span, high=high + (pad or 1e-9) * span, start=start, stop=stop)


def _axis(x: _Scale, y: float) -> Markup:
    parts = [_line(x.start, y, x.stop, y, "axis")]
    inset = (x.high - x.low) * 0.08 / 1.16
    for value, anchor in ((x.low + inset, "start"), (x.high - inset, "end")):
        parts.append(_line(x(value), 4, x(value), y, "grid"))
        parts.append(_text(x(value), y + 14, plain_number(value), anchor=anchor))
    return Markup("").join(parts)


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    return Markup('<line class="{}" x1="{}" y1="{}" x2="{}" y2="{}"/>').format(kind, x1, y1, x2, y2)


def _text(x: float, y: float, words: str, *, anchor: str) -> Markup:
    template = Markup('<text x="{}" y="{}" text-anchor="{}">{}</text>')
    return template.format(round(x, 1), round(y, 1), anchor, one_line(words))


def _shorten(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _svg(title: str, height: float, parts: Sequence[Markup]) -> Markup:
    name = escape(one_line(title))
    return Markup(
        '<figure class="plot"><figcaption>{}</figcaption>'
        '<svg viewBox="0 0 {:.0f} {:.0f}" role="img" aria-label="{}">{}</svg></figure>'
    ).format(name, _WIDTH, height, name, Markup("").join(parts))
