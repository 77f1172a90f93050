"""What a picture is drawn with, as inline SVG: scales, axes, lines, words.

Every text is escaped; colours are CSS classes of the page, so that one drawing serves light, dark
and paper.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from reports.text import one_line

WIDTH = 360.0
# Of the page's font, in drawing units; enough to keep words apart.
CHAR = 5.9
CURVES = ("curve", "curve-2", "curve-3", "curve-4")
# Beyond it differences of two numbers may overflow.
HUGE = 1e100
# A scale no finer than this share of its largest value: labels stay short.
_FINEST = 1e-4
# Between the outermost values and the ends of a scale.
_ROOM = 0.04


def drawable(value: float) -> bool:
    """Finite, and small enough that differences cannot overflow."""
    return math.isfinite(value) and abs(value) < HUGE


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A straight map from data to drawing units, with the values of its ticks."""

    low: float
    high: float
    start: float
    stop: float
    ticks: tuple[float, ...] = ()

    def __call__(self, value: float) -> float:
        """The place of a value, to a tenth of a drawing unit; never outside of the scale."""
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + min(max(share, 0.0), 1.0) * (self.stop - self.start), 1)


def fit(values: Iterable[float], start: float, stop: float, *, ticks: int = 4) -> Scale:
    """A scale over all drawable values with a little room; about `ticks` ticks, at least two.

    Ticks lie at multiples of 1, 2 or 5 times a power of ten.
    """
    found = [value for value in values if drawable(value)] or [0.0]
    low, high = min(found), max(found)
    least = max(_FINEST * max(abs(low), abs(high)), 1e-12)
    room = max(_ROOM * (high - low), (least - (high - low)) / 2)
    low, high = low - room, high + room
    places: list[float] = []
    while len(places) < 2:
        step = nice_step((high - low) / ticks)
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        places = [round(number * step, 15) for number in range(first, last + 1)]
        ticks += 1
    return Scale(low=low, high=high, start=start, stop=stop, ticks=tuple(places))


def nice_step(least: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is not under `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next((f * power for f in (1.0, 2.0, 5.0) if f * power >= least * (1 - 1e-9)), 10 * power)


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    """A straight line."""
    return Markup('<line class="{}" x1="{}" y1="{}" x2="{}" y2="{}"/>').format(
        kind, *map(_short, (x1, y1, x2, y2))
    )


def box(x: float, y: float, width: float, height: float, kind: str) -> Markup:
    """A filled rectangle."""
    return Markup('<rect class="{}" x="{}" y="{}" width="{}" height="{}"/>').format(
        kind, *map(_short, (x, y, max(width, 0.0), max(height, 0.0)))
    )


def dot(x: float, y: float, radius: float) -> Markup:
    """A filled circle."""
    template = Markup('<circle class="dot" cx="{}" cy="{}" r="{}"/>')
    return template.format(*map(_short, (x, y, radius)))


def text(x: float, y: float, words: str, *, anchor: str = "start") -> Markup:
    """Words on one line."""
    template = Markup('<text class="text" x="{}" y="{}" text-anchor="{}">{}</text>')
    return template.format(_short(x), _short(y), anchor, one_line(words))


def trace(points: Sequence[tuple[float, float]], x: Scale, y: Scale, kind: str) -> Markup:
    """A line through the points; gaps where a value is not drawable, a dot for a lone point."""
    words: list[str] = []
    pen = "M"
    for at, value in points:
        if drawable(at) and drawable(value):
            words.append(f"{pen}{_short(x(at))} {_short(y(value))}")
            pen = "L"
        else:
            pen = "M"
    # A path of one point has no length: a round cap shows it where the page sets one.
    path = "".join(words) + ("h.1" if len(words) == 1 else "")
    return Markup('<path class="{}" d="{}"/>').format(kind, path)


def shorten(words: str, width: float) -> str:
    """The words, cut with an ellipsis to what fits into so many drawing units."""
    most = max(2, int(width / CHAR))
    clean = one_line(words)
    return clean if len(clean) <= most else clean[: most - 1] + "…"


def picture(title: str, says: str, bottom: float, parts: Iterable[Markup]) -> Markup:
    """The whole drawing, with its name and what it shows in words; its axis is at the `bottom`."""
    template = Markup(
        '<svg viewBox="0 0 {} {}" role="img"><title>{}</title><desc>{}</desc>{}</svg>'
    )
    told = one_line(title), one_line(says), Markup("").join(parts)
    return template.format(_short(WIDTH), _short(bottom + 34), *told)


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def close_by(levels: Iterable[float], held: Sequence[float], far: float) -> list[float]:
    """The levels no further from the values than `far` times their width.

    One that is further would flatten what is drawn.
    """
    if not held:
        return []
    low, high = min(held), max(held)
    room = far * ((high - low) or abs(high))
    return [one for one in levels if drawable(one) and low - room <= one <= high + room]


def axis_below(x: Scale, y: float, words: str) -> list[Markup]:
    """The axis under a drawing: ticks with their values, and what is counted."""
    parts = [line(x.start, y, x.stop, y, "axis")]
    for tick, label in _labels(x):
        parts.append(line(x(tick), y, x(tick), y + 3, "axis"))
        parts.append(text(x(tick), y + 14, label, anchor=_anchor(x(tick))))
    parts.append(text((x.start + x.stop) / 2, y + 28, words, anchor="middle"))
    return parts


def axis_left(y: Scale, left: float, right: float) -> list[Markup]:
    """Lines across the drawing at the ticks of the heights, with their values."""
    parts = [line(left, y.start, right, y.start, "axis")]
    for tick, label in _labels(y):
        parts.append(line(left, y(tick), right, y(tick), "grid"))
        parts.append(text(left - 4, y(tick) + 4, label, anchor="end"))
    return parts


def _labels(scale: Scale) -> list[tuple[float, str]]:
    return [(tick, f"{tick:.6g}") for tick in scale.ticks]


def _anchor(at: float) -> str:
    """Where words at the edge of the drawing have to begin or end."""
    return "start" if at < 16 else "end" if at > WIDTH - 16 else "middle"
