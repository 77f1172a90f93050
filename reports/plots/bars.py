"""Pictures of bars: the course of a run, and the interval of a check against its limit."""

from __future__ import annotations

from collections.abc import Iterator

from markupsafe import Markup

from reports import plots
from reports.text import limit_text, one_line, value_text
from runbook.records import Check, LaunchEntry, Mark, Outcome, PhaseRecord, RunRecord
from runbook.records.measurement import TOKENS_PER_SECOND, duration_text

_LEFT, _RIGHT = 104.0, plots.WIDTH - 8.0
_ROW = 24.0
_FROM, _TO = 12.0, plots.WIDTH - 12.0
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

    kind, phase = "timeline", ""
    title = "Course of the run"

    def __init__(self, record: RunRecord) -> None:
        self.phases = [one for one in record.phases if 0 < one.duration_s < plots.HUGE]
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
        x = plots.fit([0.0, total / factor], _LEFT, _RIGHT)
        bottom = 6 + _ROW * len(self.phases)
        parts = [plots.line(x(tick), 4, x(tick), bottom, "grid") for tick in x.ticks]
        begun = 0.0
        for number, phase in enumerate(self.phases):
            parts += _row(phase, begun, x, factor, 6 + _ROW * number)
            begun += phase.duration_s
        parts += plots.axis_below(x, bottom, unit)
        return plots.picture(self.title, self.says, bottom + 34, parts)


def _row(
    phase: PhaseRecord, begun: float, x: plots.Scale, factor: float, top: float
) -> Iterator[Markup]:
    end = begun + phase.duration_s
    left, right = x(begun / factor), x(end / factor)
    yield plots.text(_LEFT - 6, top + 14, plots.shorten(phase.name, _LEFT - 10), anchor="end")
    yield plots.box(left, top + 4, max(right - left, 1.5), 9, _kind(phase))
    for entry in phase.launches:
        seconds = min(entry.result.duration_s, end - begun)
        if seconds > 0:
            start, begun = begun, begun + seconds
            width = x(begun / factor) - x(start / factor)
            yield plots.box(
                x(start / factor), top + 15, max(width - 0.5, 1.0), 4, _launch_kind(entry)
            )
    words = _words(phase)
    room_right, room_left = _RIGHT - right - 4, left - _LEFT - 4
    if plots.CHAR * len(words) <= room_right or room_right >= room_left:
        yield plots.text(right + 4, top + 13, plots.shorten(words, room_right))
    else:
        yield plots.text(left - 4, top + 13, plots.shorten(words, room_left), anchor="end")


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


class Interval:
    """One check: its estimate and interval, and the level that it is held against.

    A ratio without a limit is held against 1.
    """

    kind = "interval"

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
        self.held = [one for one in held if isinstance(one, float) and plots.drawable(one)]

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
        near = plots.near([self.level.value] if self.level else [], self.held, _FAR)
        x = plots.fit([*self.held, *near], _FROM, _TO)
        unit = self.measured.unit if self.measured else ""
        parts = [plots.line(x(tick), _TOP, x(tick), _BOTTOM, "grid") for tick in x.ticks]
        parts += self._level(x, near)
        parts.append(plots.line(x(low), _BAR, x(high), _BAR, "spread"))
        parts.append(plots.dot(x(estimate), _BAR, 4))
        parts += plots.axis_below(x, _BOTTOM, _AXES.get(unit, unit))
        return plots.picture(self.title, self.says, _BOTTOM + 34, parts)

    def _level(self, x: plots.Scale, near: list[float]) -> Iterator[Markup]:
        if self.level is None:
            return
        off = "" if near else " (off this scale)"
        yield plots.text(_FROM, 12, plots.shorten(self.level.label + off, _TO - _FROM))
        for at in near:
            yield plots.line(x(at), _TOP, x(at), _BOTTOM, "limit")
