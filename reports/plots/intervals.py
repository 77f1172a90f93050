"""The number of a check with the interval that decided, against its limit."""

from __future__ import annotations

from collections.abc import Iterator

from markupsafe import Markup

from reports.plots import draw
from reports.row import limit_text, value_text
from runbook.records import Check, Mark
from runbook.records.measurement import TOKENS_PER_SECOND

_LEFT, _RIGHT = 12.0, draw.WIDTH - 12.0
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


class Interval:
    """One check: its estimate and interval, and the level that it is held against.

    A ratio without a limit is held against 1.
    """

    kind = "interval"

    def __init__(self, check: Check) -> None:
        self.check = check
        self.measured = measured = check.measurement
        self.title = f"{check.id}: {check.outcome}"
        limit = check.limit
        self.level: Mark | None = None
        if isinstance(limit, float) and not isinstance(limit, bool):
            self.level = Mark(label=f"limit {limit_text(check)}", value=limit)
        elif limit is None and measured and measured.unit == "ratio":
            self.level = Mark(label="equal: 1", value=1.0)
        held = [*(measured.interval or ()), measured.value] if measured else []
        self.held = [one for one in held if isinstance(one, float) and draw.drawable(one)]

    @property
    def empty(self) -> bool:
        """True where the check has no interval, or nothing to hold it against."""
        return self.level is None or len(self.held) < 3

    @property
    def caption(self) -> str:
        """What is drawn, and from which files."""
        return (
            f"Dot and bar: estimate and interval. From {self.measured.where}."
            if self.measured
            else ""
        )

    @property
    def says(self) -> str:
        """The picture in words."""
        words = [value_text(self.measured)] if self.measured else []
        return "; ".join([*words, *([self.level.label] if self.level else [])])

    def svg(self) -> Markup:
        """The drawing."""
        low, high, estimate = self.held
        near = draw.near([self.level.value] if self.level else [], self.held, _FAR)
        x = draw.fit([*self.held, *near], _LEFT, _RIGHT)
        unit = self.measured.unit if self.measured else ""
        parts = [draw.line(x(tick), _TOP, x(tick), _BOTTOM, "grid") for tick in x.ticks]
        parts += self._level(x, near)
        parts.append(draw.line(x(low), _BAR, x(high), _BAR, "spread"))
        parts.append(draw.dot(x(estimate), _BAR, 4))
        parts += draw.axis_below(x, _BOTTOM, _AXES.get(unit, unit))
        return draw.picture(self.title, self.says, _BOTTOM + 34, parts)

    def _level(self, x: draw.Scale, near: list[float]) -> Iterator[Markup]:
        if self.level is None:
            return
        off = "" if near else " (off this scale)"
        yield draw.text(_LEFT, 12, draw.shorten(self.level.label + off, _RIGHT - _LEFT))
        for at in near:
            yield draw.line(x(at), _TOP, x(at), _BOTTOM, "limit")
