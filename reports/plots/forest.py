"""An estimate with the interval that decided, the single values behind it, and the limits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from markupsafe import Markup

from reports.plots import draw
from reports.plots.units import compared_in_gib
from reports.row import one_line
from runbook.records import Check, Compared, Comparison, Mark, Span
from runbook.records.measurement import TOKENS_PER_SECOND, plain_number

_LEFT, _RIGHT = 12.0, draw.WIDTH - 12.0
_ROW = 52.0
# Of a row: where its words stand, the first and last of its dots, and its interval.
_WORDS, _FIRST, _LAST, _BAR = 12.0, 20.0, 34.0, 43.0
# Units that say what a number is, not how much one of it is.
_KINDS = ("ratio", "E", "share")
# What the axis counts, for a reader who meets the unit for the first time.
_AXES = {
    "ratio": "ratio of speeds: above 1 the first one named is faster",
    "E": "scaling efficiency E: at 1 every rank is as fast as one alone",
    "share": "as a share: 0.1 is 10 %",
    "nats": "nats, the unit of the loss",
    TOKENS_PER_SECOND: "tokens per second (tok/s)",
}
_TIE = "TIE"
# Far away: further than so many times the width of what is drawn.
_FAR = 8.0
_OFF = " (off this scale)"


class Forest:
    """A forest plot of a comparison: one row for each estimate, all on one scale."""

    def __init__(self, comparison: Comparison, title: str = "") -> None:
        self.of = of = compared_in_gib(comparison)
        self.title = title or f"{of.title}: {of.answer}".removesuffix(": ")

    @property
    def empty(self) -> bool:
        """True if no row has a number that can be drawn."""
        return not any(_numbers(row) for row in self.of.rows)

    @property
    def caption(self) -> str:
        """What the dots are, from which files, and what a reader may take it for."""
        parts = []
        if any(row.values for row in self.of.rows):
            parts.append(f"Small dots: {self.of.each} each, the first on top.")
        bars = any(row.measurement.interval for row in self.of.rows)
        parts.append(
            f"Large dot{' and bar' if bars else ''}: estimate{' and interval' if bars else ''}."
        )
        if self.of.answer.startswith(_TIE):
            parts.append("TIE: none is shown to be faster.")
        if not any(row.decides for row in self.of.rows):
            parts.append("Shown only: it does not decide here.")
        return " ".join([*parts, f"From {self.of.rows[0].measurement.where}."])

    @property
    def says(self) -> str:
        """The picture in words."""
        answer = [self.of.answer] if self.of.answer else []
        rows = [f"{row.label}: {said(row, self.of.unit)}" for row in self.of.rows]
        marks = [mark_text(mark, self.of.unit) for mark in self._marks()]
        marks += [span_text(self.of.margin, self.of.unit)] if self.of.margin else []
        return "; ".join([*rows, *answer, *marks])

    def svg(self) -> Markup:
        """The drawing."""
        x = self._scale()
        key = list(self._key(x))
        top = 8 + draw.LINE * len(key)
        parts = [part for number, entry in enumerate(key) for part in _entry(number, entry)]
        for number, row in enumerate(self.of.rows):
            at = top + _ROW * number
            parts += self._ground(x, at + _FIRST - 4, at + _ROW - 3)
            parts += _row(row, x, at)
        bottom = top + _ROW * len(self.of.rows)
        parts += draw.axis_below(x, bottom, _AXES.get(self.of.unit, self.of.unit))
        return draw.picture(self.title, self.says, bottom + 34, parts)

    def _marks(self) -> list[Mark]:
        return [*([self.of.reference] if self.of.reference else []), *self.of.limits]

    def _scale(self) -> draw.Scale:
        held = [value for row in self.of.rows for value in _numbers(row)]
        levels = [mark.value for mark in self._marks()]
        ends = [self.of.margin.low, self.of.margin.high] if self.of.margin else []
        shown = [*draw.near(levels, held, _FAR), *draw.near(ends, held, 2 * _FAR)]
        return draw.fit([*held, *shown], _LEFT, _RIGHT)

    def _key(self, x: draw.Scale) -> Iterator[tuple[str, str]]:
        """Class and words of everything that the rows are held against."""
        for mark in self._marks():
            kind = "axis" if mark is self.of.reference else "limit"
            yield kind, mark_text(mark, self.of.unit) + ("" if x.holds(mark.value) else _OFF)
        if self.of.margin:
            inside = x.holds(self.of.margin.low) and x.holds(self.of.margin.high)
            yield "band", span_text(self.of.margin, self.of.unit) + ("" if inside else _OFF)

    def _ground(self, x: draw.Scale, top: float, bottom: float) -> list[Markup]:
        parts = [draw.line(x(tick), top, x(tick), bottom, "grid") for tick in x.ticks]
        if (
            self.of.margin
            and draw.drawable(self.of.margin.low)
            and draw.drawable(self.of.margin.high)
        ):
            low, high = x(self.of.margin.low), x(self.of.margin.high)
            parts.insert(0, draw.box(low, top, high - low, bottom - top, "band"))
        for mark in self._marks():
            if x.holds(mark.value):
                kind = "axis" if mark is self.of.reference else "limit"
                parts.append(draw.line(x(mark.value), top, x(mark.value), bottom, kind))
        return parts


def forest_of_check(check: Check) -> Forest | None:
    """The interval of a check against its limit; None where one of the two is missing."""
    measured, limit = check.measurement, check.limit
    if measured is None or measured.interval is None:
        return None
    if isinstance(limit, bool) or not isinstance(limit, (int, float)):
        return None
    title = f"{check.id} against its limit"
    against = Comparison(
        check=check.id,
        title=title,
        each="",
        unit=measured.unit,
        answer=check.outcome.value,
        rows=(Compared(label=measured.name, values=(), measurement=measured),),
        limits=(Mark(label=f"limit ({check.comparator.value})", value=float(limit)),),
    )
    return Forest(against, title)


def said(row: Compared, unit: str) -> str:
    """`ratio 0.998, interval 0.991 to 1.005`, as far as it is known."""
    measured = row.measurement
    value = plain_number(measured.value)
    parts = [f"{unit} {value}" if unit in _KINDS else _in_unit(value, unit)]
    if measured.interval is not None:
        low, high = measured.interval
        parts.append(f"interval {plain_number(low)} to {plain_number(high)}")
    return ", ".join(parts if row.decides else [*parts, "does not decide"])


def mark_text(mark: Mark, unit: str) -> str:
    """A labelled level in words."""
    return f"{mark.label}: {_in_unit(plain_number(mark.value), unit)}"


def span_text(span: Span, unit: str) -> str:
    """A labelled stretch in words."""
    return (
        f"{span.label}: {_in_unit(f'{plain_number(span.low)} to {plain_number(span.high)}', unit)}"
    )


def _in_unit(number: str, unit: str) -> str:
    return number if unit in _KINDS else f"{number} {unit}".rstrip()


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
        draw.text(_LEFT, top + _WORDS, draw.shorten(row.label, room)),
        draw.text(_RIGHT, top + _WORDS, numbers, anchor="end"),
    ]
    apart = (_LAST - _FIRST) / max(len(row.values) - 1, 1)
    for number, value in enumerate(row.values):
        if draw.drawable(value):
            parts.append(draw.dot(x(value), top + _FIRST + apart * number, 2.2))
    interval: Sequence[float] = row.measurement.interval or ()
    if interval and all(map(draw.drawable, interval)):
        parts.append(draw.line(x(interval[0]), top + _BAR, x(interval[1]), top + _BAR, "spread"))
    estimate = row.measurement.value
    if isinstance(estimate, float) and draw.drawable(estimate):
        parts.append(draw.dot(x(estimate), top + _BAR, 4))
    return parts


def _short_said(row: Compared) -> str:
    text = one_line(plain_number(row.measurement.value))
    if row.measurement.interval is None:
        return text
    low, high = map(plain_number, row.measurement.interval)
    return f"{text} ({low} to {high})"
