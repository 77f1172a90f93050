"""A run for people: a line a phase, and below it what goes on, redrawn or as a line for a pipe."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from nsa.contract import Phase
from runbook import __version__
from runbook.console import Console, marked
from runbook.errors import how_many, in_one_line
from runbook.files import near
from runbook.launch.observer import Forecast, Observer, Pulse
from runbook.records import (
    Check,
    Comparator,
    Launch,
    LaunchResult,
    Measurement,
    PhaseRecord,
    RunRecord,
)
from runbook.records.measurement import TOKENS_PER_SECOND, duration_text, plain_number

if TYPE_CHECKING:
    from rich.console import RenderableType

_INDENT = "      "
_REDRAW_S = 0.5
PLAIN_INTERVAL_S = 30.0


class RunView(Observer, ExitStack):
    """An observer for the time of a `with` block; it knows the run's folder once there is one."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.run_root = ""
        self._console = console
        self._order: tuple[str, ...] = ()

    def run_started(self, run_id: str, run_root: str, phases: tuple[str, ...]) -> None:
        """Remember the folder and the order of the phases."""
        self.run_root = run_root
        self._order = phases
        self._announce(run_id)

    def _announce(self, run_id: str) -> None:
        raise NotImplementedError

    def _place(self, phase: str) -> str:
        """`3/9`, or nothing for a phase that was not announced."""
        if phase not in self._order:
            return ""
        total = str(len(self._order))
        return f"{self._order.index(phase) + 1:>{len(total)}}/{total}"


class TextObserver(RunView):
    """One line a phase on stderr, and what runs now.

    On a terminal two lines below are redrawn twice a second. Elsewhere (a pipe, CI, TERM=dumb) a
    plain line comes every 30 s. Both come from a thread of their own, so that a harness that is
    busy itself is seen to be alive; events only remember.
    """

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console)
        self._clock = clock
        self._lock = threading.RLock()
        # Whoever writes a result holds it, so that no line about what went on before comes later.
        self._writing = threading.RLock()
        self._progress = Progress(began=clock())
        self._last_note = ""

    def __enter__(self) -> Self:
        if not self._console.quiet:
            ended = threading.Event()
            ticker = threading.Thread(target=self._tick, args=(ended,), daemon=True)
            ticker.start()
            self.callback(self._hide)
            self.callback(ticker.join)
            self.callback(ended.set)
        return self

    def _tick(self, ended: threading.Event) -> None:
        while not ended.wait(_REDRAW_S if self._console.is_live else PLAIN_INTERVAL_S):
            self.show()

    def show(self) -> None:
        """Draw what goes on now; a line of it where nothing can be redrawn."""
        console, now = self._console, self._clock()
        with self._writing:
            # Written outside this lock: a terminal that is held (Ctrl-S) must not hold the harness.
            with self._lock:
                if not self._progress.phase:
                    return
                screen = self._progress.screen(now)
                line = self._progress.line(now)
            if console.is_live:
                console.draw(*screen)
            else:
                console.progress(_INDENT + line)

    def _announce(self, run_id: str) -> None:
        line = f"runbook {__version__}  run {run_id}  {how_many(len(self._order), 'phase')}"
        self._console.progress(f"{line}  -> {near(self.run_root)}")
        with self._lock:
            self._progress = Progress(began=self._clock())

    def phase_started(self, name: str, title: str, launches: int) -> None:
        """Show the phase until its first launch starts."""
        del title, launches
        self._enter(name)

    def launch_started(self, launch: Launch, attempt: int) -> None:
        """Show the launch with its steps."""
        if attempt > 1:
            where = f"{launch.phase}/{launch.name}"
            self._console.progress(f"{_INDENT}{where} starts again (attempt {attempt})")
        with self._lock:
            self._progress.start(in_one_line(launch.name), attempt, launch.steps, self._clock())

    def launch_progress(
        self, launch: Launch, step: int, total: int, toks_per_s: float | None
    ) -> None:
        """Remember the step."""
        del launch
        with self._lock:
            self._progress.step, self._progress.total = step, total
            self._progress.rate = toks_per_s

    def launch_ranks(self, launch: Launch, pulse: Pulse) -> None:
        """Remember who lives and who is silent."""
        del launch
        with self._lock:
            self._progress.pulse = pulse

    def run_forecast(self, forecast: Forecast) -> None:
        """Remember how far the run is."""
        with self._lock:
            self._progress.forecast, self._progress.forecast_at = forecast, self._clock()

    def launch_finished(self, launch: Launch, result: LaunchResult) -> None:
        """A line only if it did not end well, and only if the watchdog has not said so already."""
        self._enter(launch.phase)
        told = bool(result.cause) and result.cause in self._last_note
        if not result.ok and not told:
            how = result.status.words
            says_so = result.cause.startswith(how)  # `interrupted by SIGINT`
            how = result.cause if says_so else ": ".join(filter(None, (how, result.cause)))
            self._console.progress(f"{_INDENT}{launch.phase}/{launch.name} {how}")

    def phase_finished(self, record: PhaseRecord) -> None:
        """The phase's line: outcome, its throughput if it has one, checks, time.

        After it, nothing is told of the phase.
        """
        with self._writing:
            self._hide()
            self._console.progress(self._phase_line(record))

    def _phase_line(self, record: PhaseRecord) -> str:
        console, width = self._console, max((len(name) for name in self._order), default=0)
        word, took = record.outcome.value, duration_text(record.duration_s)
        place, facts = self._place(record.name), in_one_line(headline(record))
        line = (
            f" {place} {record.name:<{width}}  ",
            word,
            f"{'':{12 - len(word)}}  {facts:<56}  {took}",
        )
        if console.columns and len("".join(line)) >= console.columns:
            line = f" {place} {record.name}  ", word, f"  {facts}  {took}"
        return marked(*line, color=console.color_err, width=console.columns)

    def run_finished(self, record: RunRecord, run_root: str) -> None:
        """Stop drawing; the summary follows on stdout."""
        del run_root
        self._hide()
        if record.interrupted:
            self._console.progress(f"{_INDENT}interrupted; no process of the run is left")

    def note(self, text: str) -> None:
        """A line for a person."""
        self._last_note = text
        self._console.progress(_INDENT + text)

    def _enter(self, phase: str) -> None:
        with self._lock:
            self._progress.enter(self._place(phase), in_one_line(phase), self._clock())

    def _hide(self) -> None:
        with self._writing:
            self._enter("")
            if self._console.is_live:
                self._console.draw()


def headline(record: PhaseRecord) -> str:
    """A throughput with sample size and limit if one was measured, and the passed checks."""
    for check in record.checks:
        if check.measurement is not None and check.measurement.unit == TOKENS_PER_SECOND:
            return f"{_rate(check, check.measurement)}  {record.tally}"
    return record.tally


def _rate(check: Check, measured: Measurement) -> str:
    spread = f" +- {measured.stdev:.3g}" if measured.stdev is not None else ""
    text = f"{plain_number(measured.value)}{spread} {measured.unit} (n={measured.n})"
    if isinstance(check.limit, int | float) and check.comparator is not Comparator.NONE:
        text += f" {check.comparator.value} {check.limit:g}"
    return text


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


def silence_text(pulse: Pulse) -> str:
    """`rank 1 silent 7 s (usual 0.3 s), stopped; rank 0 too`; of a launch, where no rank tells."""
    if not pulse.silent:
        return ""
    first, *others = pulse.silent
    usual = f" (usual {first.usual_s:.1f} s)" if first.usual_s is not None else ""
    state = f", {first.state}" if first.state else ""
    too = f"; rank {', '.join(str(one.rank) for one in others)} too" if others else ""
    silence = duration_text(round(first.silent_s))
    who = f"rank {first.rank}" if pulse.wanted else "log and console"
    return f"{who} silent {silence}{usual}{state}{too}"


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

    @property
    def where(self) -> str:
        """`2/9 baseline/run1  (attempt 2)`; without the attempt, if it is the first."""
        launch = f"/{self.launch}" if self.launch else ""
        again = f"  (attempt {self.attempt})" if launch and self.attempt > 1 else ""
        return f"{self.place.strip()} {self.phase}{launch}{again}".strip()

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
        words = [silence_text(self.pulse), step]
        if self.pulse.busy:
            word = _BUSY.get(Phase(self.pulse.busy), self.pulse.busy)
            words.append(f"{word}, {duration_text(round(self.pulse.busy_s))}")
        elif not step:
            words.append(f"running, {duration_text(round(now - self.since))}")
        elif self.pulse.wanted and not self.pulse.alive:
            words.append("ending")
        elif self.rate is not None and not self.pulse.silent:
            words.append(f"{self.rate:,.0f} {TOKENS_PER_SECOND}")
        return words

    @property
    def ranks(self) -> str:
        """`ranks 2/2`, empty for a launch without heartbeats."""
        return f"ranks {self.pulse.alive}/{self.pulse.wanted}" if self.pulse.wanted else ""

    def screen(self, now: float) -> tuple[RenderableType, ...]:
        """For a terminal: the run, how far it is, and what runs now."""
        from rich.progress_bar import ProgressBar

        share = self.forecast.share if self.forecast else 0.0
        so_far = f"{duration_text(round(now - self.began))} so far"
        return (
            _joined(self.where, percent(share), self.left_text(now), so_far),
            ProgressBar(total=1.0, completed=min(share, _MOST), width=_BAR),
            _joined(*self.doing(now), self.ranks),
        )

    def line(self, now: float) -> str:
        """All of it on one line, for a pipe."""
        share = percent(self.forecast.share) if self.forecast else ""
        words = (self.where, *self.doing(now), self.ranks, share, self.left_text(now))
        return _joined(*words)


def _joined(*words: str) -> str:
    return "  ".join(word for word in words if word)
