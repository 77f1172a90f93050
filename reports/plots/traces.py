"""Curves over the steps, all of a group on one scale: warm-up, window, limits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from markupsafe import Markup

from reports import plots
from reports.text import one_line
from runbook.records import Mark, Series, Window
from runbook.records.measurement import plain_number
from runbook.text import listed

_LEFT, _RIGHT = 46.0, plots.WIDTH - 10.0
_HEIGHT = 120.0
_FAR = 2.0
_TITLES = {
    "throughput": "Throughput of every step",
    "loss": "Loss",
    "memory": "Memory of every rank",
    "tensors": "Memory of every rank's tensors",
    "gates": "Gates of the three branches",
}


class Traces:
    """The curves of one group; the fourth and all after it look alike."""

    def __init__(self, phase: str, group: str, curves: Sequence[Series]) -> None:
        self.phase, self.kind = phase, group or "trace"
        self.curves = curves
        self.unit = curves[0].unit
        self.title = one_line(_TITLES.get(group) or group or curves[0].name)
        self._held = [y for curve in curves for _, y in _counted(curve)]
        self.limits = list(dict.fromkeys(mark for curve in curves for mark in curve.limits))
        near = set(plots.near([mark.value for mark in self.limits], self._held, _FAR))
        self._near = [mark for mark in self.limits if mark.value in near]

    @property
    def empty(self) -> bool:
        """True where no curve has two points that can be drawn."""
        return all(len(_counted(curve)) < 2 for curve in self.curves)

    @property
    def caption(self) -> str:
        """How many points there are, in which files, and the limits that are not drawn."""
        counts = sorted({curve.n for curve in self.curves})
        each = " to ".join(str(n) for n in dict.fromkeys((counts[0], counts[-1])))
        paths = list(dict.fromkeys(curve.path for curve in self.curves))
        far = "; ".join(self._words(mark) for mark in self.limits if mark not in self._near)
        left_out = f" Too far away to draw: {far}." if far else ""
        return one_line(f"{each} readings, in {listed(paths, 1)}.{left_out}")

    @property
    def says(self) -> str:
        """The picture in words."""
        limits = "; ".join(map(self._words, self.limits))
        told = [_said(curve) for curve in self.curves]
        return ". ".join([*told, f"Limits: {limits}"] if limits else told)

    def svg(self) -> Markup:
        """The drawing."""
        key = list(self._key())
        top = 12 + plots.LINE * (plots.key_rows([words for _, words in key], _RIGHT - 4) + 1)
        bottom = top + _HEIGHT
        steps = [x for curve in self.curves for x, _ in curve.points]
        x = plots.fit(steps, _LEFT, _RIGHT, ticks=5)
        # A share is read against nothing and all of it.
        whole = [0.0, 1.0] if self.unit == "share" and all(0 <= y <= 1 for y in self._held) else []
        y = plots.fit([*self._held, *(mark.value for mark in self._near), *whole], bottom, top)
        parts = [*plots.key(key, _RIGHT - 4), plots.text(2, top - 10, self.unit)]
        for span, kind in self._shades():
            left, right = x(span.first_step), x(span.last_step)
            parts.append(plots.box(left, top, max(right - left, 1.0), _HEIGHT, kind))
        parts += plots.axis_left(y, _LEFT, _RIGHT)
        parts += [
            plots.curve(curve.points, x, y, kind)
            for kind, curve in zip(self._kinds(), self.curves, strict=True)
        ]
        for mark in self._near:
            at = y(mark.value)
            words = plots.shorten(self._words(mark), _RIGHT - _LEFT - 4)
            parts.append(plots.line(_LEFT, at, _RIGHT, at, "limit"))
            parts.append(plots.text(_RIGHT - 2, at - 3, words, anchor="end"))
        parts += plots.axis_below(x, bottom, self.curves[0].x_label)
        return plots.picture(self.title, self.says, bottom + 34, parts)

    def _words(self, mark: Mark) -> str:
        return f"{mark.label}: {plain_number(mark.value)} {self.unit}".rstrip()

    def _shades(self) -> Iterator[tuple[Window, str]]:
        """Warm-up and window of the first curve that has one."""
        for kind, name in (("shade-warmup", "warmup"), ("shade", "window")):
            spans = [span for curve in self.curves if (span := getattr(curve, name))]
            yield from ((span, kind) for span in spans[:1])

    def _kinds(self) -> list[str]:
        last = len(plots.CURVES) - 1
        return [plots.CURVES[min(place, last)] for place in range(len(self.curves))]

    def _key(self) -> Iterator[tuple[str, str]]:
        if len(self.curves) > 1:
            *others, last = plots.CURVES
            labels = [_label(curve) for curve in self.curves]
            yield from zip(others, labels, strict=False)
            if rest := labels[len(others) :]:
                yield last, rest[0] if len(rest) == 1 else f"{len(rest)} others"
        words = {"shade-warmup": "warm-up, counts in nothing", "shade": "last 50 steps"}
        yield from ((kind, words[kind]) for _, kind in self._shades())


def _counted(curve: Series) -> list[tuple[float, float]]:
    """The points that a scale has to show: those after the warm-up, if there are two."""
    found = [(x, y) for x, y in curve.points if plots.drawable(x) and plots.drawable(y)]
    end = curve.warmup.last_step if curve.warmup else -math.inf
    later = [(x, y) for x, y in found if x > end]
    return later if len(later) > 1 else found


def _label(curve: Series) -> str:
    return curve.label or curve.name


def _said(curve: Series) -> str:
    held = [y for _, y in _counted(curve)]
    if not held:
        return f"{_label(curve)}: nothing that can be drawn"
    least, most, last = map(plain_number, (min(held), max(held), held[-1]))
    span = f"{least} to {most} {curve.unit}".rstrip()
    return f"{_label(curve)}: {span}, last {last}"
