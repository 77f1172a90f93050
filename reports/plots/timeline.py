"""The course of a run: when each phase and launch ran, how long, and what went wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime

from markupsafe import Markup

from reports.plots import draw
from runbook.records import LaunchEntry, Outcome, PhaseRecord, RunRecord
from runbook.records.measurement import duration_text

_LEFT, _RIGHT = 104.0, draw.WIDTH - 8.0
_ROW = 24.0


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A stretch of the run's time in seconds from its beginning; `launches` lie inside a phase."""

    name: str
    start: float
    seconds: float
    kind: str
    said: str
    launches: tuple[Bar, ...] = ()


class Timeline:
    """Bars of a run. A pause longer than all that ran (a run continued later) is cut out."""

    title = "Course of the run"

    def __init__(self, record: RunRecord) -> None:
        self.bars, self.pauses = _without_pauses(list(_bars(record)))

    @property
    def caption(self) -> str:
        """The length, and what is not drawn."""
        total = sum(bar.seconds for bar in self.bars)
        cut = "".join(
            f" A pause of {duration_text(length)} is cut out." for _, length in self.pauses
        )
        return f"{duration_text(total)} in {len(self.bars)} phases; thin bars: launches.{cut}"

    @property
    def says(self) -> str:
        """The picture in words."""
        return "; ".join(
            ", ".join([f"{bar.name} {duration_text(bar.seconds)}", *_faults(bar)])
            for bar in self.bars
        )

    def svg(self) -> Markup:
        """The drawing."""
        ends = [bar.start + bar.seconds for bar in self.bars]
        unit, factor = _unit(max(ends, default=0.0))
        x = draw.fit([0.0, *(end / factor for end in ends)], _LEFT, _RIGHT)
        bottom = 6 + _ROW * len(self.bars)
        parts = [draw.line(x(tick), 4, x(tick), bottom, "grid") for tick in x.ticks]
        parts += [
            draw.line(x(at / factor), 4, x(at / factor), bottom, "limit") for at, _ in self.pauses
        ]
        for number, bar in enumerate(self.bars):
            parts += _row(bar, x, factor, 6 + _ROW * number)
        parts += draw.axis_below(x, bottom, unit)
        return draw.picture(self.title, self.says, bottom + 34, parts)


def _row(bar: Bar, x: draw.Scale, factor: float, top: float) -> list[Markup]:
    left, right = x(bar.start / factor), x((bar.start + bar.seconds) / factor)
    parts = [
        draw.text(_LEFT - 6, top + 14, draw.shorten(bar.name, _LEFT - 10), anchor="end"),
        draw.box(left, top + 4, max(right - left, 1.5), 9, bar.kind),
    ]
    for one in bar.launches:
        start, stop = x(one.start / factor), x((one.start + one.seconds) / factor)
        parts.append(draw.box(start, top + 15, max(stop - start - 0.5, 1.0), 4, one.kind))
    words = ", ".join([duration_text(bar.seconds), *_faults(bar)])
    room_right, room_left = _RIGHT - right - 4, left - _LEFT - 4
    wide = draw.CHAR * len(words)
    if wide <= room_right or room_right >= room_left:
        return [*parts, draw.text(right + 4, top + 13, draw.shorten(words, room_right))]
    return [*parts, draw.text(left - 4, top + 13, draw.shorten(words, room_left), anchor="end")]


def _faults(bar: Bar) -> list[str]:
    """What went wrong; the launch is named where there are several."""
    several = len(bar.launches) > 1
    return [f"{one.name} {one.said}" if several else one.said for one in bar.launches if one.said]


def _bars(record: RunRecord) -> Iterator[Bar]:
    """Phases that ran; one that does not say when follows the one before it."""
    begin = _time(record.started_at)
    at = 0.0
    for phase in record.phases:
        if not (draw.drawable(phase.duration_s) and phase.duration_s > 0):
            continue
        began = _time(phase.started_at)
        if begin is not None and began is not None:
            at = max(0.0, began - begin)
        yield Bar(
            name=phase.name,
            start=at,
            seconds=phase.duration_s,
            kind=_kind(phase),
            said="",
            launches=tuple(_launches(phase, at, begin)),
        )
        at += phase.duration_s


def _launches(phase: PhaseRecord, start: float, begin: float | None) -> Iterator[Bar]:
    at = start
    for entry in phase.launches:
        began = _time(entry.result.started_at)
        if begin is not None and began is not None:
            at = began - begin
        # Starts are told in whole seconds: never outside of the phase.
        at = min(max(at, start), start + phase.duration_s)
        seconds = min(entry.result.duration_s, start + phase.duration_s - at)
        if not seconds > 0:
            continue
        yield Bar(
            name=entry.launch.name,
            start=at,
            seconds=seconds,
            kind=_launch_kind(entry),
            said=_said(entry),
        )
        at += seconds


def _kind(phase: PhaseRecord) -> str:
    if phase.outcome.rank <= Outcome.INVALID.rank:
        return "bar-fail"
    return "bar-pass" if phase.outcome is Outcome.PASS else "bar-warn"


def _launch_kind(entry: LaunchEntry) -> str:
    if not entry.result.ok:
        return "bar-fail"
    return "bar-warn" if entry.result.attempts > 1 else "bar-pass"


def _said(entry: LaunchEntry) -> str:
    result = entry.result
    tries = f"{result.attempts} attempts" if result.attempts > 1 else ""
    ended = "" if result.ok else result.status.value.replace("_", " ")
    rank = "" if result.culprit_rank is None else f"rank {result.culprit_rank}"
    return ", ".join(word for word in (ended, rank, tries) if word)


def _without_pauses(bars: list[Bar]) -> tuple[tuple[Bar, ...], tuple[tuple[float, float], ...]]:
    """The bars moved together where a pause is longer than everything that ran."""
    total = sum(bar.seconds for bar in bars)
    moved: list[Bar] = []
    pauses: list[tuple[float, float]] = []
    shift = end = 0.0
    for bar in bars:
        if bar.start - end > total:
            pauses.append((end - shift, bar.start - end))
            shift += bar.start - end
        end = max(end, bar.start + bar.seconds)
        moved.append(_moved(bar, -shift))
    return tuple(moved), tuple(pauses)


def _moved(bar: Bar, by: float) -> Bar:
    launches = tuple(_moved(one, by) for one in bar.launches)
    return replace(bar, start=bar.start + by, launches=launches)


def _time(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def _unit(seconds: float) -> tuple[str, float]:
    """What the axis counts in: seconds, minutes or hours from the beginning."""
    if seconds < 300:
        return "seconds from the start", 1.0
    return (
        ("minutes from the start", 60.0) if seconds < 4 * 3600 else ("hours from the start", 3600.0)
    )
