"""What is known of a run while it goes on: for a terminal, and as a line for a pipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nsa.contract import Phase
from runbook.records.events import Forecast, Pulse, SilentRank
from runbook.records.measurement import TOKENS_PER_SECOND, duration_text

if TYPE_CHECKING:
    from rich.console import RenderableType

_BAR = 40
# What is told while something runs is never all of it.
_MOST = 0.99
_BUSY = {
    Phase.INIT: "starting",
    Phase.FIRST_STEP: "first step",
    Phase.EVAL: "evaluating",
    Phase.CHECKPOINT: "writing a checkpoint",
    Phase.PROFILE: "profiling",
}


def percent(share: float) -> str:
    """`34 %`."""
    return f"{int(100 * min(share, _MOST))} %"


def silence_text(silent: Sequence[SilentRank]) -> str:
    """`rank 1 silent 7 s (usual 0.3 s), stopped; rank 0 too`."""
    if not silent:
        return ""
    first, *others = silent
    usual = f" (usual {first.usual_s:.1f} s)" if first.usual_s is not None else ""
    state = f", {first.state}" if first.state else ""
    too = f"; rank {', '.join(str(one.rank) for one in others)} too" if others else ""
    silence = duration_text(round(first.silent_s))
    return f"rank {first.rank} silent {silence}{usual}{state}{too}"


@dataclass(kw_only=True)
class Progress:
    """What was heard last. Times are on the observer's clock."""

    began: float
    place: str = ""
    phase: str = ""
    launch: str = ""
    attempt: int = 1
    since: float = 0.0
    step: int = 0
    total: int = 0
    rate: float | None = None
    pulse: Pulse = field(default_factory=Pulse)
    forecast: Forecast | None = None
    forecast_at: float = 0.0

    def enter(self, place: str, phase: str, now: float) -> None:
        """A phase begins, or goes on without a launch."""
        self.place, self.phase, self.launch, self.since = place, phase, "", now
        self.pulse = Pulse()

    def start(self, launch: str, attempt: int, steps: int, now: float) -> None:
        """A launch begins."""
        self.launch, self.attempt, self.since = launch, attempt, now
        self.step, self.total, self.rate, self.pulse = 0, steps, None, Pulse()

    def advance(self, step: int, total: int, rate: float | None) -> None:
        """The launch has done a step."""
        self.step, self.total, self.rate = step, total, rate

    @property
    def where(self) -> str:
        """`2/9 baseline/run1`."""
        launch = f"/{self.launch}" if self.launch else ""
        return f"{self.place.strip()} {self.phase}{launch}".strip()

    def left_text(self, now: float) -> str:
        """`1 min 40 s left`, or an empty text where nothing is known."""
        if self.forecast is None or self.forecast.left_s is None:
            return ""
        left_s = round(self.forecast.left_s - (now - self.forecast_at))
        if left_s <= 0:
            return ""  # it takes longer than was expected, and nobody knows how long
        least = "over " if self.forecast.unknown else "about " if self.forecast.rough else ""
        return f"{least}{duration_text(left_s)} left"

    def doing(self, now: float) -> list[str]:
        """What the launch does now. A rate stands there only while its ranks are heard."""
        if not self.launch:
            return [f"collecting and judging, {duration_text(round(now - self.since))}"]
        step = f"step {self.step}/{self.total}" if self.total and self.step else ""
        words = [silence_text(self.pulse.silent), step]
        if self.pulse.busy:
            word = _BUSY.get(Phase(self.pulse.busy), self.pulse.busy)
            words.append(f"{word}, {duration_text(round(self.pulse.busy_s))}")
        elif not step:
            words.append(f"running, {duration_text(round(now - self.since))}")
        elif self._all_ended:
            words.append("ending")
        elif self._moving and self.rate is not None:
            words.append(f"{self.rate:,.0f} {TOKENS_PER_SECOND}")
        return words

    @property
    def _all_ended(self) -> bool:
        return bool(self.pulse.wanted) and not self.pulse.alive

    @property
    def _moving(self) -> bool:
        return not (self.pulse.silent or self.pulse.busy or self._all_ended)

    @property
    def ranks(self) -> str:
        """`ranks 2/2`, empty for a launch without heartbeats."""
        return f"ranks {self.pulse.alive}/{self.pulse.wanted}" if self.pulse.wanted else ""

    @property
    def again(self) -> str:
        """`(attempt 2)`, empty for the first one."""
        return f"(attempt {self.attempt})" if self.launch and self.attempt > 1 else ""

    def screen(self, now: float) -> tuple[RenderableType, ...]:
        """For a terminal: the run, how far it is, and what runs now."""
        from rich.progress_bar import ProgressBar

        share = self.forecast.share if self.forecast else 0.0
        so_far = f"{duration_text(round(now - self.began))} so far"
        return (
            _joined(self.where, self.again, percent(share), self.left_text(now), so_far),
            ProgressBar(total=1.0, completed=min(share, _MOST), width=_BAR),
            _joined(*self.doing(now), self.ranks),
        )

    def line(self, now: float) -> str:
        """All of it on one line, for a pipe."""
        share = percent(self.forecast.share) if self.forecast else ""
        words = (self.where, self.again, *self.doing(now), self.ranks, share, self.left_text(now))
        return _joined(*words)


def _joined(*words: str) -> str:
    return "  ".join(word for word in words if word)
