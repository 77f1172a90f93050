"""The pictures of a report, as inline SVG, drawn from the record alone.

The course of a run, a check's interval against its limit, curves over steps. No scripts, nothing
fetched, every text escaped; colours are CSS classes of the page, so that one drawing serves light,
dark and paper.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

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
from runbook.files import shipped_data
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
from runbook.records.measurement import duration_text, plain_number

_LEFT, _RIGHT = 104.0, WIDTH - 8.0
_ROW = 24.0
_FROM, _TO = 12.0, WIDTH - 12.0
_TOP, _BAR, _BOTTOM = 20.0, 32.0, 44.0
# Further away than so many times the width of the interval, a limit would flatten it.
_FAR = 8.0
# What an axis counts, and the titles of curves that share a picture.
_WORDS = shipped_data("report/words")


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A drawing, and its caption. `phase` is empty for the whole run.

    `kind` is timeline, interval, or the group of the curves (throughput, loss, memory, tensors,
    gates); trace where a curve has none. `key`: what each class of the drawing means.
    """

    kind: str
    title: str
    caption: str
    svg: Markup
    phase: str = ""
    key: Sequence[tuple[str, str]] = ()


def figures(record: RunRecord) -> tuple[Figure, ...]:
    """Every picture of the run: first its course, then phase by phase what decided."""
    of_phases = (one for phase in record.phases for one in _of(phase))
    return tuple(one for one in (_timeline(record), *of_phases) if one is not None)


def _of(phase: PhaseRecord) -> Iterator[Figure | None]:
    """What decided, and the curves that share a scale; one without a group stands alone."""
    yield from map(_interval, phase.checks)
    groups: dict[tuple[str, str], list[Series]] = {}
    for curve in phase.series:
        groups.setdefault((curve.group, "" if curve.group else curve.name), []).append(curve)
    yield from (_traces(phase.name, group, curves) for (group, _), curves in groups.items())


def _timeline(record: RunRecord) -> Figure | None:
    """A bar for each phase that ran, from where the one before it ended; thin ones for launches."""
    phases = [one for one in record.phases if 0 < one.duration_s < HUGE]
    if not phases:
        return None
    total = sum(phase.duration_s for phase in phases)
    unit, factor = _unit(total)
    x = fit([0.0, total / factor], _LEFT, _RIGHT)
    bottom = 6 + _ROW * len(phases)
    parts = [line(x(tick), 4, x(tick), bottom, "grid") for tick in x.ticks]
    begun = 0.0
    for number, phase in enumerate(phases):
        parts += _row(phase, begun, x, factor, 6 + _ROW * number)
        begun += phase.duration_s
    parts += axis_below(x, bottom, unit)
    title = "Course of the run"
    says = "; ".join(f"{phase.name} {_words(phase)}" for phase in phases)
    return Figure(
        kind="timeline",
        title=title,
        caption=f"{duration_text(total)} in {len(phases)} phases; thin bars: launches.",
        svg=picture(title, says, bottom, parts),
    )


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


def _interval(check: Check) -> Figure | None:
    """One check: its estimate and interval, and the level that it is held against.

    None where it has no interval, or nothing to hold it against.
    """
    measured, level = check.measurement, _level(check)
    if measured is None or measured.interval is None or level is None:
        return None
    values = (*measured.interval, measured.value)
    held = [one for one in values if isinstance(one, float) and drawable(one)]
    if len(held) < len(values):
        return None
    low, high, estimate = held
    near = close_by([level.value], held, _FAR)
    x = fit([*held, *near], _FROM, _TO)
    words = level.label if near else f"{level.label} (off this scale)"
    parts = [line(x(tick), _TOP, x(tick), _BOTTOM, "grid") for tick in x.ticks]
    parts.append(text(_FROM, 12, shorten(words, _TO - _FROM)))
    parts += [line(x(at), _TOP, x(at), _BOTTOM, "limit") for at in near]
    parts += [line(x(low), _BAR, x(high), _BAR, "spread"), dot(x(estimate), _BAR, 4)]
    parts += axis_below(x, _BOTTOM, _WORDS["axes"].get(measured.unit, measured.unit))
    title = f"{check.id}: {check.outcome}"
    source = f"(dot and bar: estimate and interval, from {measured.where})"
    return Figure(
        kind="interval",
        phase=check.phase,
        title=title,
        caption=one_line(f"{check.reason} {source}"),
        svg=picture(title, f"{value_text(measured)}; {level.label}", _BOTTOM, parts),
    )


def _level(check: Check) -> Mark | None:
    """What it is held against: its limit, or 1 for a ratio that has none."""
    if isinstance(check.limit, float):
        return Mark(label=f"limit {limit_text(check)}", value=check.limit)
    if check.limit is None and check.measurement and check.measurement.unit == "ratio":
        return Mark(label="equal: 1", value=1.0)
    return None


_AXIS, _EDGE = 46.0, WIDTH - 10.0
_CEILING, _HEIGHT = 26.0, 120.0
_FAR_LIMIT = 2.0


def _traces(phase: str, group: str, curves: Sequence[Series]) -> Figure | None:
    """The curves of one group; None where none has two points that can be drawn."""
    if all(len(_counted(curve)) < 2 for curve in curves):
        return None
    unit, held = curves[0].unit, [y for curve in curves for _, y in _counted(curve)]
    limits = dict.fromkeys(mark for curve in curves for mark in curve.limits)
    told = {mark: f"{mark.label}: {plain_number(mark.value)} {unit}".rstrip() for mark in limits}
    levels = close_by([mark.value for mark in limits], held, _FAR_LIMIT)
    near = {mark: words for mark, words in told.items() if mark.value in levels}
    far = "; ".join(words for mark, words in told.items() if mark not in near)
    title = one_line(_WORDS["curves"].get(group) or group or curves[0].name)
    says = [*map(_in_words, curves), *([f"Limits: {'; '.join(told.values())}"] if told else [])]
    return Figure(
        kind=group or "trace",
        phase=phase,
        title=title,
        caption=_readings(curves, f" Too far away to draw: {far}." if far else ""),
        svg=picture(title, ". ".join(says), _CEILING + _HEIGHT, _panel(curves, held, near)),
        key=_key(curves),
    )


def _panel(
    curves: Sequence[Series], held: Sequence[float], limits: Mapping[Mark, str]
) -> Iterator[Markup]:
    """The curves over their steps, and the limits that are near; the fourth and all after it look
    alike.
    """
    top, bottom, unit = _CEILING, _CEILING + _HEIGHT, curves[0].unit
    x = fit([x for curve in curves for x, _ in curve.points], _AXIS, _EDGE, ticks=5)
    # A share is read against nothing and all of it.
    whole = [0.0, 1.0] if unit == "share" and all(0 <= y <= 1 for y in held) else []
    y = fit([*held, *(mark.value for mark in limits), *whole], bottom, top)
    yield text(2, top - 10, unit)
    for span, kind in _shades(curves):
        left, right = x(span.first_step), x(span.last_step)
        yield box(left, top, max(right - left, 1.0), _HEIGHT, kind)
    yield from axis_left(y, _AXIS, _EDGE)
    for place, curve in enumerate(curves):
        yield trace(curve.points, x, y, CURVES[min(place, len(CURVES) - 1)])
    for mark, words in limits.items():
        at = y(mark.value)
        yield line(_AXIS, at, _EDGE, at, "limit")
        yield text(_EDGE - 2, at - 3, shorten(words, _EDGE - _AXIS - 4), anchor="end")
    yield from axis_below(x, bottom, curves[0].x_label)


def _readings(curves: Sequence[Series], left_out: str) -> str:
    """How many points there are, in which files, and what is not drawn."""
    counts = sorted({curve.n for curve in curves})
    each = " to ".join(str(n) for n in dict.fromkeys((counts[0], counts[-1])))
    paths = list(dict.fromkeys(curve.path for curve in curves))
    return one_line(f"{each} readings, in {listed(paths, 1)}.{left_out}")


def _shades(curves: Sequence[Series]) -> Iterator[tuple[Window, str]]:
    """Warm-up and window of the first curve that has one."""
    for kind, name in (("shade-warmup", "warmup"), ("shade", "window")):
        spans = [span for curve in curves if (span := getattr(curve, name))]
        yield from ((span, kind) for span in spans[:1])


def _key(curves: Sequence[Series]) -> list[tuple[str, str]]:
    """What each class of the drawing means."""
    words = {"shade-warmup": "warm-up, counts in nothing", "shade": "last 50 steps"}
    shades = [(kind, words[kind]) for _, kind in _shades(curves)]
    labels = [_label(curve) for curve in curves]
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
