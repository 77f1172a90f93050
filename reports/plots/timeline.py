"""The course of a run: how long each phase and launch took, in order, and what went wrong."""

from __future__ import annotations

from collections.abc import Iterator

from markupsafe import Markup

from reports.plots import draw
from runbook.records import LaunchEntry, Outcome, PhaseRecord, RunRecord
from runbook.records.measurement import duration_text

_LEFT, _RIGHT = 104.0, draw.WIDTH - 8.0
_ROW = 24.0


class Timeline:
    """A bar for each phase that ran, from where the one before it ended; thin ones for launches."""

    kind = "timeline"
    title = "Course of the run"

    def __init__(self, record: RunRecord) -> None:
        self.phases = [one for one in record.phases if 0 < one.duration_s < draw.HUGE]
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
        x = draw.fit([0.0, total / factor], _LEFT, _RIGHT)
        bottom = 6 + _ROW * len(self.phases)
        parts = [draw.line(x(tick), 4, x(tick), bottom, "grid") for tick in x.ticks]
        begun = 0.0
        for number, phase in enumerate(self.phases):
            parts += _row(phase, begun, x, factor, 6 + _ROW * number)
            begun += phase.duration_s
        parts += draw.axis_below(x, bottom, unit)
        return draw.picture(self.title, self.says, bottom + 34, parts)


def _row(
    phase: PhaseRecord, begun: float, x: draw.Scale, factor: float, top: float
) -> Iterator[Markup]:
    end = begun + phase.duration_s
    left, right = x(begun / factor), x(end / factor)
    yield draw.text(_LEFT - 6, top + 14, draw.shorten(phase.name, _LEFT - 10), anchor="end")
    yield draw.box(left, top + 4, max(right - left, 1.5), 9, _kind(phase))
    for entry in phase.launches:
        seconds = min(entry.result.duration_s, end - begun)
        if seconds > 0:
            start, begun = begun, begun + seconds
            width = x(begun / factor) - x(start / factor)
            yield draw.box(
                x(start / factor), top + 15, max(width - 0.5, 1.0), 4, _launch_kind(entry)
            )
    words = _words(phase)
    room_right, room_left = _RIGHT - right - 4, left - _LEFT - 4
    if draw.CHAR * len(words) <= room_right or room_right >= room_left:
        yield draw.text(right + 4, top + 13, draw.shorten(words, room_right))
    else:
        yield draw.text(left - 4, top + 13, draw.shorten(words, room_left), anchor="end")


def _kind(phase: PhaseRecord) -> str:
    if phase.outcome.rank <= Outcome.INVALID.rank:
        return "bar-fail"
    return "bar-pass" if phase.outcome is Outcome.PASS else "bar-warn"


def _launch_kind(entry: LaunchEntry) -> str:
    if not entry.result.ok:
        return "bar-fail"
    return "bar-warn" if entry.result.attempts > 1 else "bar-pass"


def _words(phase: PhaseRecord) -> str:
    """How long it took and what went wrong; the launch is named where there are several."""
    several = len(phase.launches) > 1
    faults = [(entry.launch.name, _said(entry)) for entry in phase.launches]
    told = [f"{name} {said}" if several else said for name, said in faults if said]
    return ", ".join([duration_text(phase.duration_s), *told])


def _said(entry: LaunchEntry) -> str:
    result = entry.result
    tries = f"{result.attempts} attempts" if result.attempts > 1 else ""
    ended = "" if result.ok else result.status.value.replace("_", " ")
    rank = "" if result.culprit_rank is None else f"rank {result.culprit_rank}"
    return ", ".join(word for word in (ended, rank, tries) if word)


def _unit(seconds: float) -> tuple[str, float]:
    """What the axis counts in: seconds, minutes or hours of the run."""
    if seconds < 300:
        return "seconds", 1.0
    return ("minutes", 60.0) if seconds < 4 * 3600 else ("hours", 3600.0)
