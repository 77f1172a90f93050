"""An estimate with the interval that decided, the single values behind it, and the limits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from reports.plots import draw
from reports.view import limit_text, one_line
from runbook.records import Check, Compared, Comparison, Mark, Span
from runbook.records.measurement import plain_number

_LEFT, _RIGHT = 12.0, draw.WIDTH - 12.0
_ROW = 42.0
# Far away: further than so many times the width of what is drawn.
_FAR = 2.0


@dataclass(frozen=True, kw_only=True)
class Forest:
    """A forest plot: one row for each estimate, all on one scale."""

    title: str
    each: str
    unit: str
    answer: str
    rows: tuple[Compared, ...]
    reference: Mark | None = None
    margin: Span | None = None
    limits: tuple[Mark, ...] = ()

    @property
    def empty(self) -> bool:
        """True if no row has a number that can be drawn."""
        return not any(_numbers(row) for row in self.rows)

    @property
    def caption(self) -> str:
        """What the dots are, how many, and from which files."""
        first = self.rows[0]
        small = f"Small dots: {self.each}. " if any(row.values for row in self.rows) else ""
        return f"{small}Large dot and bar: estimate and interval. From {first.measurement.where}."

    @property
    def says(self) -> str:
        """The picture in words."""
        answer = f": {self.answer}" if self.answer else ""
        rows = "; ".join(f"{row.label}: {said(row, self.unit)}" for row in self.rows)
        marks = [mark_text(mark) for mark in self._marks()]
        if self.margin:
            marks.append(span_text(self.margin))
        return f"{rows}{answer}. {'; '.join(marks)}".strip()

    def svg(self) -> Markup:
        """The drawing."""
        x = self._scale()
        key = list(self._key(x))
        top = 6 + draw.LINE * len(key)
        bottom = top + _ROW * len(self.rows)
        parts = [part for number, entry in enumerate(key) for part in _entry(number, entry)]
        parts += self._ground(x, top, bottom)
        for number, row in enumerate(self.rows):
            parts += _row(row, x, top + _ROW * number)
        parts += draw.axis_below(x, bottom, self.unit)
        return draw.picture(self.title, self.says, bottom + 34, parts)

    def _marks(self) -> list[Mark]:
        return [*([self.reference] if self.reference else []), *self.limits]

    def _scale(self) -> draw.Scale:
        held = [value for row in self.rows for value in _numbers(row)]
        levels = [mark.value for mark in self._marks()]
        levels += [self.margin.low, self.margin.high] if self.margin else []
        return draw.fit([*held, *draw.near(levels, held, _FAR)], _LEFT, _RIGHT)

    def _key(self, x: draw.Scale) -> Iterator[tuple[str, str]]:
        """Class and words of everything that the rows are held against."""
        for mark in self._marks():
            kind = "axis" if mark is self.reference else "limit"
            off = "" if x.holds(mark.value) else " (off this scale)"
            yield kind, mark_text(mark) + off
        if self.margin:
            yield "band", span_text(self.margin)

    def _ground(self, x: draw.Scale, top: float, bottom: float) -> list[Markup]:
        parts = [draw.line(x(tick), top, x(tick), bottom, "grid") for tick in x.ticks]
        if self.margin and draw.drawable(self.margin.low) and draw.drawable(self.margin.high):
            low, high = x(self.margin.low), x(self.margin.high)
            parts.insert(0, draw.box(low, top, high - low, bottom - top, "band"))
        for mark in self._marks():
            if x.holds(mark.value):
                kind = "axis" if mark is self.reference else "limit"
                parts.append(draw.line(x(mark.value), top, x(mark.value), bottom, kind))
        return parts


def forest_of(comparison: Comparison) -> Forest:
    """The picture of a comparison."""
    return Forest(
        title=comparison.title,
        each=comparison.each,
        unit=comparison.unit,
        answer=comparison.answer,
        rows=comparison.rows,
        reference=comparison.reference,
        margin=comparison.margin,
        limits=comparison.limits,
    )


def forest_of_check(check: Check) -> Forest | None:
    """The interval of a check against its limit; None where one of the two is missing."""
    measured, limit = check.measurement, check.limit
    if measured is None or measured.interval is None:
        return None
    if isinstance(limit, bool) or not isinstance(limit, (int, float)):
        return None
    return Forest(
        title=f"{check.id} against its limit",
        each="",
        unit=measured.unit,
        answer=check.outcome.value,
        rows=(Compared(label=measured.name, values=(), measurement=measured),),
        limits=(Mark(label=f"limit {limit_text(check)}", value=float(limit)),),
    )


def said(row: Compared, unit: str) -> str:
    """`0.998 (0.991 to 1.005), n=6`, as far as it is known."""
    measured = row.measurement
    text = plain_number(measured.value)
    if measured.interval is not None:
        low, high = measured.interval
        text += f", interval {plain_number(low)} to {plain_number(high)}"
    return f"{text} {unit}".rstrip() + ("" if row.decides else ", does not decide")


def mark_text(mark: Mark) -> str:
    """A labelled level in words."""
    return f"{mark.label}: {plain_number(mark.value)}"


def span_text(span: Span) -> str:
    """A labelled stretch in words."""
    return f"{span.label}: {plain_number(span.low)} to {plain_number(span.high)}"


def _numbers(row: Compared) -> list[float]:
    value = row.measurement.value
    found: list[float] = [*row.values, *(row.measurement.interval or ())]
    if isinstance(value, float) and not isinstance(value, bool):
        found.append(value)
    return [one for one in found if draw.drawable(one)]


def _entry(number: int, entry: tuple[str, str]) -> list[Markup]:
    kind, words = entry
    y = 6 + draw.LINE * number
    swatch = (
        draw.box(_LEFT, y, 14, 9, kind)
        if kind == "band"
        else draw.line(_LEFT + 7, y - 1, _LEFT + 7, y + 10, kind)
    )
    return [swatch, draw.text(_LEFT + 20, y + 9, draw.shorten(words, _RIGHT - _LEFT - 20))]


def _row(row: Compared, x: draw.Scale, top: float) -> list[Markup]:
    numbers = _short_said(row)
    room = _RIGHT - _LEFT - draw.CHAR * (len(numbers) + 2)
    parts = [
        draw.text(_LEFT, top + 13, draw.shorten(row.label, room)),
        draw.text(_RIGHT, top + 13, numbers, anchor="end"),
    ]
    parts += [draw.dot(x(value), top + 22, 2.2) for value in row.values if draw.drawable(value)]
    interval: Sequence[float] = row.measurement.interval or ()
    if interval and all(map(draw.drawable, interval)):
        parts.append(draw.line(x(interval[0]), top + 33, x(interval[1]), top + 33, "spread"))
    value = row.measurement.value
    if isinstance(value, float) and draw.drawable(value):
        parts.append(draw.dot(x(value), top + 33, 4))
    return parts


def _short_said(row: Compared) -> str:
    text = one_line(plain_number(row.measurement.value))
    if row.measurement.interval is None:
        return text
    low, high = map(plain_number, row.measurement.interval)
    return f"{text} ({low} to {high})"
