"""The pictures of a report, as inline SVG, drawn from the record alone.

The course of a run, a check's interval against its limit, curves over steps. No scripts, nothing
fetched, every text escaped; colours are CSS classes of the page, so that one drawing serves light,
dark and paper.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from markupsafe import Markup

from reports.axes import (
    CHAR,
    CURVES,
    HUGE,
    WIDTH,
    Scale,
    axis_below,
    axis_left,
    box,
    close_by,
    dot,
    drawable,
    fit,
    line,
    picture,
    shorten,
    text,
    trace,
)
from reports.text import limit_text, one_line, value_text
from runbook.errors import listed
from runbook.records import (
    Check,
    LaunchEntry,
    Mark,
    Outcome,
    PhaseRecord,
    RunRecord,
    Series,
    Window,
)
from runbook.records.measurement import TOKENS_PER_SECOND, duration_text, plain_number

_LEFT, _RIGHT = 104.0, WIDTH - 8.0
_ROW = 24.0
_FROM, _TO = 12.0, WIDTH - 12.0
_TOP, _BAR, _BOTTOM = 20.0, 32.0, 44.0
# Further away than so many times the width of the interval, a limit would flatten it.
_FAR = 8.0
# What the axis counts, for a reader who meets the unit for the first time.
_AXES = {
    "ratio": "ratio of speeds: above 1 the first one named is faster",
    "": "as a share: 0.1 is 10 %",
    "nats": "nats, the unit of the loss",
    TOKENS_PER_SECOND: "tokens per second (tok/s)",
}


class Timeline:
    """A bar for each phase that ran, from where the one before it ended; thin ones for launches."""

    kind, phase, key = "timeline", "", ()
    title = "Course of the run"

    def __init__(self, record: RunRecord) -> None:
        self.phases = [one for one in record.phases if 0 < one.duration_s < HUGE]
        self.empty = not self.phases

    @property
    def caption(self) -> str:
        """How long all of it took."""
        total = duration_text(sum(phase.duration_s for phase in self.phases))
        return f"{total} in {len(self.phases)} phases; thin bars: launches."

    @property
    def says(self) -> str:
        """The picture in words."""
        return "; ".join(f"{phase.name} {_words(phase)}" for phase in self.phases)

    def svg(self) -> Markup:
        """The drawing."""
        total = sum(phase.duration_s for phase in self.phases)
        unit, factor = _unit(total)
        x = fit([0.0, total / factor], _LEFT, _RIGHT)
        bottom = 6 + _ROW * len(self.phases)
        parts = [line(x(tick), 4, x(tick), bottom, "grid") for tick in x.ticks]
        begun = 0.0
        for number, phase in enumerate(self.phases):
            parts += _row(phase, begun, x, factor, 6 + _ROW * number)
            begun += phase.duration_s
        parts += axis_below(x, bottom, unit)
        return picture(self.title, self.says, bottom + 34, parts)


def _row(phase: PhaseRecord, begun: float, x: Scale, factor: float, top: float) -> Iterator[Markup]:
    end = begun + phase.duration_s
    left, right = x(begun / factor), x(end / factor)
    yield text(_LEFT - 6, top + 14, shorten(phase.name, _LEFT - 10), anchor="end")
    yield box(left, top + 4, max(right - left, 1.5), 9, _kind(phase))
    for entry in phase.launches:
        seconds = min(entry.result.duration_s, end - begun)
        if seconds > 0:
            start, begun = begun, begun + seconds
            width = x(begun / factor) - x(start / factor)
            yield box(x(start / factor), top + 15, max(width - 0.5, 1.0), 4, _launch_kind(entry))
    words = _words(phase)
    room_right, room_left = _RIGHT - right - 4, left - _LEFT - 4
    if CHAR * len(words) <= room_right or room_right >= room_left:
        yield text(right + 4, top + 13, shorten(words, room_right))
    else:
        yield text(left - 4, top + 13, shorten(words, room_left), anchor="end")


def _kind(phase: PhaseRecord) -> str:
    if phase.outcome.rank <= Outcome.INVALID.rank:
        return "bar-fail"
    return "bar-pass" if phase.outcome is Outcome.PASS else "bar-warn"


def _launch_kind(entry: LaunchEntry) -> str:
    if not entry.result.ok:
        return "bar-fail"
    return "bar-warn" if entry.result.attempts > 1 else "bar-pass"


def _words(phase: PhaseRecord) -> str:
    """How long it took, and how it came out where that was not well."""
    well = phase.outcome in (Outcome.PASS, Outcome.SKIPPED)
    return duration_text(phase.duration_s) + ("" if well else f", {phase.outcome.value}")


def _unit(seconds: float) -> tuple[str, float]:
    """What the axis counts in: seconds, minutes or hours of the run."""
    if seconds < 300:
        return "seconds", 1.0
    return ("minutes", 60.0) if seconds < 4 * 3600 else ("hours", 3600.0)


class Interval:
    """One check: its estimate and interval, and the level that it is held against.

    A ratio without a limit is held against 1.
    """

    kind, key = "interval", ()

    def __init__(self, check: Check) -> None:
        self.check = check
        self.measured = measured = check.measurement
        self.phase, self.title = check.phase, f"{check.id}: {check.outcome}"
        limit = check.limit
        self.level: Mark | None = None
        if isinstance(limit, float) and not isinstance(limit, bool):
            self.level = Mark(label=f"limit {limit_text(check)}", value=limit)
        elif limit is None and measured and measured.unit == "ratio":
            self.level = Mark(label="equal: 1", value=1.0)
        held = [*(measured.interval or ()), measured.value] if measured else []
        self.held = [one for one in held if isinstance(one, float) and drawable(one)]

    @property
    def empty(self) -> bool:
        """True where the check has no interval, or nothing to hold it against."""
        return self.level is None or len(self.held) < 3

    @property
    def caption(self) -> str:
        """What the check says of it, and from which files."""
        where = self.measured.where if self.measured else ""
        return one_line(f"{self.check.reason} (dot and bar: estimate and interval, from {where})")

    @property
    def says(self) -> str:
        """The picture in words."""
        words = [value_text(self.measured)] if self.measured else []
        return "; ".join([*words, *([self.level.label] if self.level else [])])

    def svg(self) -> Markup:
        """The drawing."""
        low, high, estimate = self.held
        near = close_by([self.level.value] if self.level else [], self.held, _FAR)
        x = fit([*self.held, *near], _FROM, _TO)
        unit = self.measured.unit if self.measured else ""
        parts = [line(x(tick), _TOP, x(tick), _BOTTOM, "grid") for tick in x.ticks]
        parts += self._level(x, near)
        parts.append(line(x(low), _BAR, x(high), _BAR, "spread"))
        parts.append(dot(x(estimate), _BAR, 4))
        parts += axis_below(x, _BOTTOM, _AXES.get(unit, unit))
        return picture(self.title, self.says, _BOTTOM + 34, parts)

    def _level(self, x: Scale, near: list[float]) -> Iterator[Markup]:
        if self.level is None:
            return
        off = "" if near else " (off this scale)"
        yield text(_FROM, 12, shorten(self.level.label + off, _TO - _FROM))
        for at in near:
            yield line(x(at), _TOP, x(at), _BOTTOM, "limit")


_AXIS, _EDGE = 46.0, WIDTH - 10.0
_CEILING, _HEIGHT = 26.0, 120.0
_FAR_LIMIT = 2.0
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
        near = set(close_by([mark.value for mark in self.limits], self._held, _FAR_LIMIT))
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
        told = [_in_words(curve) for curve in self.curves]
        return ". ".join([*told, f"Limits: {limits}"] if limits else told)

    def svg(self) -> Markup:
        """The drawing."""
        top, bottom = _CEILING, _CEILING + _HEIGHT
        steps = [x for curve in self.curves for x, _ in curve.points]
        x = fit(steps, _AXIS, _EDGE, ticks=5)
        # A share is read against nothing and all of it.
        whole = [0.0, 1.0] if self.unit == "share" and all(0 <= y <= 1 for y in self._held) else []
        y = fit([*self._held, *(mark.value for mark in self._near), *whole], bottom, top)
        parts = [text(2, top - 10, self.unit)]
        for span, kind in self._shades():
            left, right = x(span.first_step), x(span.last_step)
            parts.append(box(left, top, max(right - left, 1.0), _HEIGHT, kind))
        parts += axis_left(y, _AXIS, _EDGE)
        parts += [
            trace(curve.points, x, y, kind)
            for kind, curve in zip(self._kinds(), self.curves, strict=True)
        ]
        for mark in self._near:
            at = y(mark.value)
            words = shorten(self._words(mark), _EDGE - _AXIS - 4)
            parts.append(line(_AXIS, at, _EDGE, at, "limit"))
            parts.append(text(_EDGE - 2, at - 3, words, anchor="end"))
        parts += axis_below(x, bottom, self.curves[0].x_label)
        return picture(self.title, self.says, bottom + 34, parts)

    def _words(self, mark: Mark) -> str:
        return f"{mark.label}: {plain_number(mark.value)} {self.unit}".rstrip()

    def _shades(self) -> Iterator[tuple[Window, str]]:
        """Warm-up and window of the first curve that has one."""
        for kind, name in (("shade-warmup", "warmup"), ("shade", "window")):
            spans = [span for curve in self.curves if (span := getattr(curve, name))]
            yield from ((span, kind) for span in spans[:1])

    def _kinds(self) -> list[str]:
        last = len(CURVES) - 1
        return [CURVES[min(place, last)] for place in range(len(self.curves))]

    @property
    def key(self) -> list[tuple[str, str]]:
        """What each class of the drawing means."""
        words = {"shade-warmup": "warm-up, counts in nothing", "shade": "last 50 steps"}
        shades = [(kind, words[kind]) for _, kind in self._shades()]
        labels = [_label(curve) for curve in self.curves]
        if len(labels) > len(CURVES):
            labels[len(CURVES) - 1 :] = [f"{len(labels) - len(CURVES) + 1} others"]
        return [*(zip(CURVES, labels, strict=False) if len(labels) > 1 else ()), *shades]


def _counted(curve: Series) -> list[tuple[float, float]]:
    """The points that a scale has to show: those after the warm-up, if there are two."""
    found = [(x, y) for x, y in curve.points if drawable(x) and drawable(y)]
    end = curve.warmup.last_step if curve.warmup else -math.inf
    later = [(x, y) for x, y in found if x > end]
    return later if len(later) > 1 else found


def _label(curve: Series) -> str:
    return curve.label or curve.name


def _in_words(curve: Series) -> str:
    held = [y for _, y in _counted(curve)]
    if not held:
        return f"{_label(curve)}: nothing that can be drawn"
    least, most, last = map(plain_number, (min(held), max(held), held[-1]))
    span = f"{least} to {most} {curve.unit}".rstrip()
    return f"{_label(curve)}: {span}, last {last}"
