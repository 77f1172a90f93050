"""Curves over the steps, to one scale where they belong together: warm-up, window, limits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from reports.plots import draw
from reports.plots.forest import mark_text
from reports.plots.units import curves_in_gib
from runbook.records import Mark, Series
from runbook.records.measurement import plain_number

_LEFT, _RIGHT = 46.0, draw.WIDTH - 10.0
_FAR = 2.0
_MOST_CURVES = len(draw.CURVES)
_TITLES = {
    "throughput": "Throughput of every step",
    "loss": "Loss",
    "memory": "Memory of every rank",
    "tensors": "Memory of every rank's tensors",
    "gates": "Gates of the three branches",
}


@dataclass(frozen=True, kw_only=True)
class _Panel:
    """A stretch of the drawing with curves of its own."""

    curves: tuple[Series, ...]
    top: float
    bottom: float


class Traces:
    """The curves of one group: in panels of one scale where each has a window, else overlaid."""

    def __init__(self, group: str, curves: Sequence[Series]) -> None:
        self.group = group
        self.curves = curves = curves_in_gib(curves)
        self._held = [y for curve in curves for _, y in _counted(curve)]
        self._apart = len(curves) > 1 and any(curve.window for curve in curves)
        levels = {(mark.label, mark.value): mark for curve in curves for mark in curve.limits}
        self.limits = tuple(levels.values())

    @property
    def empty(self) -> bool:
        """True where no curve has two points that can be drawn."""
        return all(len(_counted(curve)) < 2 for curve in self.curves)

    @property
    def unit(self) -> str:
        """The unit of the heights."""
        return self.curves[0].unit

    @property
    def title(self) -> str:
        """The group in words, or the name of a curve that has none."""
        return _TITLES.get(self.group) or self.group or self.curves[0].name

    @property
    def caption(self) -> str:
        """How many points there are, in which files."""
        counts = sorted({curve.n for curve in self.curves})
        each = " to ".join(str(n) for n in dict.fromkeys((counts[0], counts[-1])))
        paths = list(dict.fromkeys(curve.path for curve in self.curves))
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        return f"{each} readings, in {paths[0]}{more}.{self._far_text()}"

    @property
    def says(self) -> str:
        """The picture in words."""
        told = [_said(curve) for curve in self.curves]
        limits = (
            [f"Limits: {'; '.join(self._words(mark) for mark in self.limits)}"]
            if self.limits
            else []
        )
        return ". ".join([*told, *limits])

    def svg(self) -> Markup:
        """The drawing."""
        key = list(self._key())
        rows = draw.key_rows([words for _, words in key], _RIGHT - 4)
        top = 12 + draw.LINE * (rows + 1)
        panels = self._panels(top)
        bottom = panels[-1].bottom
        x = draw.fit(self._steps(), _LEFT, _RIGHT, ticks=5)
        parts = [*draw.key(key, _RIGHT - 4), draw.text(2, top - 10, self.unit)]
        for panel in panels:
            parts += self._panel(panel, x)
        parts += draw.axis_below(x, bottom, self.curves[0].x_label)
        return draw.picture(self.title, self.says, bottom + 34, parts)

    def _panels(self, top: float) -> list[_Panel]:
        if not self._apart:
            return [_Panel(curves=self.curves, top=top, bottom=top + 120)]
        high = 62.0 if len(self.curves) <= 3 else 48.0
        return [
            _Panel(
                curves=(curve,),
                top=top + number * (high + 18),
                bottom=top + number * (high + 18) + high,
            )
            for number, curve in enumerate(self.curves)
        ]

    def _steps(self) -> list[float]:
        steps = [x for curve in self.curves for x, _ in curve.points]
        spans = [span for curve in self.curves for span in (curve.warmup, curve.window) if span]
        return steps + [float(end) for span in spans for end in (span.first_step, span.last_step)]

    def _near(self) -> list[Mark]:
        near = set(draw.near([mark.value for mark in self.limits], self._held, _FAR))
        return [mark for mark in self.limits if mark.value in near]

    def _words(self, mark: Mark) -> str:
        return mark_text(mark, self.unit)

    def _far_text(self) -> str:
        near = self._near()
        far = [self._words(mark) for mark in self.limits if mark not in near]
        return f" Too far away to draw: {'; '.join(far)}." if far else ""

    def _heights(self, panel: _Panel) -> draw.Scale:
        levels = [mark.value for mark in self._near()]
        # A share is read against nothing and all of it.
        whole = [0.0, 1.0] if self.unit == "share" and all(0 <= y <= 1 for y in self._held) else []
        ticks = 3 if self._apart else 4
        return draw.fit([*self._held, *levels, *whole], panel.bottom, panel.top, ticks=ticks)

    def _key(self) -> Iterator[tuple[str, str]]:
        if len(self.curves) > _MOST_CURVES and not self._apart:
            yield "curve", f"highest: {_label(self._highest())}"
            yield "band", f"lowest to highest of {len(self.curves)}"
        elif len(self.curves) > 1 and not self._apart:
            for kind, curve in zip(draw.CURVES, self.curves, strict=False):
                yield kind, _label(curve)
        if any(curve.warmup for curve in self.curves):
            yield "shade-warmup", "warm-up, counts in nothing, may leave the scale"
        if any(curve.window for curve in self.curves):
            yield "shade", "last 50 steps"

    def _highest(self) -> Series:
        def most(curve: Series) -> float:
            return max((y for _, y in curve.points if draw.drawable(y)), default=float("-inf"))

        return max(self.curves, key=most)

    def _panel(self, panel: _Panel, x: draw.Scale) -> list[Markup]:
        y = self._heights(panel)
        parts = []
        for curve in panel.curves:
            for span, kind in ((curve.warmup, "shade-warmup"), (curve.window, "shade")):
                if span is not None:
                    left, right = x(span.first_step), x(span.last_step)
                    width = max(right - left, 1.0)
                    parts.append(draw.box(left, panel.top, width, panel.bottom - panel.top, kind))
        parts += draw.axis_left(y, _LEFT, _RIGHT)
        parts += self._lines(panel, x, y)
        marks = [(y(mark.value), self._words(mark)) for mark in self._near()]
        drawn = [
            (x(at), y(value)) for curve in panel.curves for at, value in curve.points
            if draw.drawable(at) and draw.drawable(value)
        ] if marks else []  # fmt: skip
        parts += draw.levels(marks, _LEFT, _RIGHT, panel.bottom, avoid=drawn)
        if self._apart:
            parts.append(
                draw.text(_LEFT, panel.top - 4, draw.shorten(_label(panel.curves[0]), 240))
            )
        return parts

    def _lines(self, panel: _Panel, x: draw.Scale, y: draw.Scale) -> list[Markup]:
        if len(panel.curves) <= _MOST_CURVES:
            return [
                draw.curve(curve.points, x, y, kind)
                for kind, curve in zip(draw.CURVES, panel.curves, strict=False)
            ]
        low, high = _around(panel.curves)
        drawn = [[(x(at), y(value)) for at, value in edge] for edge in (low, high)]
        return [draw.area(*drawn), draw.curve(self._highest().points, x, y, "curve")]


def _counted(curve: Series) -> list[tuple[float, float]]:
    """The points that a scale has to show: those after the warm-up, if there are two."""
    found = [(x, y) for x, y in curve.points if draw.drawable(x) and draw.drawable(y)]
    end = curve.warmup.last_step if curve.warmup else -math.inf
    later = [(x, y) for x, y in found if x > end]
    return later if len(later) > 1 else found


def _around(
    curves: Sequence[Series],
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """The lowest and the highest of all curves at every place where one has a point."""
    found: dict[float, list[float]] = {}
    for curve in curves:
        for at, value in curve.points:
            if draw.drawable(at) and draw.drawable(value):
                found.setdefault(at, []).append(value)
    places = sorted(found)
    return [(at, min(found[at])) for at in places], [(at, max(found[at])) for at in places]


def _label(curve: Series) -> str:
    return curve.label or curve.name


def _said(curve: Series) -> str:
    held = [y for _, y in _counted(curve)]
    unit = f" {curve.unit}" if curve.unit else ""
    if not held:
        return f"{_label(curve)}: nothing that can be drawn"
    least, most, last = map(plain_number, (min(held), max(held), held[-1]))
    span = f"{least} to {most}{unit}, last {last}"
    spans = [f"warm-up {curve.warmup}"] if curve.warmup else []
    spans += [f"last-50 window {curve.window}"] if curve.window else []
    return ", ".join([f"{_label(curve)}: {span}", *spans])
