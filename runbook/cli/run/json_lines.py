"""A run for a program: each event one JSON line on stdout, as docs/events.schema.json says."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict

from runbook.cli.run.text import RunView
from runbook.console import Console
from runbook.files import utc_text_ms
from runbook.folder.manifest import fingerprint_of
from runbook.launch.observer import Forecast, Pulse
from runbook.records import Launch, LaunchResult, PhaseRecord, RunRecord, events

_STEP_EVERY_S = 0.5
_FORECAST_EVERY_S = 10.0


class JsonObserver(RunView):
    """Tells everything at once, but steps and forecasts only so often, and ranks when they change.

    The last step of a launch is always told.
    """

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console)
        self._clock = clock
        self._step_at = -math.inf
        self._held: events.LaunchProgress | None = None
        self._forecast_at = -math.inf
        self._shape: tuple[object, ...] = ()

    def _announce(self, run_id: str) -> None:
        self._say(
            events.RunStarted(
                ts=utc_text_ms(), run_id=run_id, run_root=self.run_root, phases=self._order
            )
        )

    def phase_started(self, name: str, title: str, launches: int) -> None:
        self._say(events.PhaseStarted(ts=utc_text_ms(), phase=name, title=title, launches=launches))

    def launch_started(self, launch: Launch, attempt: int) -> None:
        self._tell_held()
        self._step_at, self._shape = -math.inf, ()
        self._say(
            events.LaunchStarted(
                ts=utc_text_ms(),
                phase=launch.phase,
                launch=launch.name,
                attempt=attempt,
                steps=launch.steps,
                command=launch.command_line(),
            )
        )

    def launch_progress(
        self, launch: Launch, step: int, total: int, toks_per_s: float | None
    ) -> None:
        known = toks_per_s is not None and math.isfinite(toks_per_s)
        event = events.LaunchProgress(
            ts=utc_text_ms(),
            phase=launch.phase,
            launch=launch.name,
            step=step,
            total=total,
            toks_per_s=toks_per_s if known else None,
        )
        now = self._clock()
        if now < self._step_at + _STEP_EVERY_S:
            self._held = event
            return
        self._step_at, self._held = now, None
        self._say(event)

    def launch_ranks(self, launch: Launch, pulse: Pulse) -> None:
        if pulse.shape == self._shape:
            return
        self._shape = pulse.shape
        self._say(
            events.LaunchRanks(
                ts=utc_text_ms(),
                phase=launch.phase,
                launch=launch.name,
                alive=pulse.alive,
                wanted=pulse.wanted,
                busy=pulse.busy,
                silent=tuple(events.SilentRank(**asdict(one)) for one in pulse.silent),
            )
        )

    def run_forecast(self, forecast: Forecast) -> None:
        now = self._clock()
        if now >= self._forecast_at + _FORECAST_EVERY_S:
            self._forecast_at = now
            self._say(events.RunForecast(ts=utc_text_ms(), **asdict(forecast)))

    def launch_finished(self, launch: Launch, result: LaunchResult) -> None:
        self._tell_held()
        self._say(
            events.LaunchFinished(
                ts=utc_text_ms(), phase=launch.phase, launch=launch.name, result=result
            )
        )

    def phase_finished(self, record: PhaseRecord) -> None:
        self._say(
            events.PhaseFinished(
                ts=utc_text_ms(),
                phase=record.name,
                outcome=record.outcome,
                duration_s=record.duration_s,
                flaky=record.flaky,
                checks=record.checks,
                choices=record.choices,
            )
        )

    def run_finished(self, record: RunRecord, run_root: str) -> None:
        self.run_root = run_root
        self._say(
            events.RunFinished(
                ts=utc_text_ms(),
                run_id=record.run_id,
                run_root=run_root,
                fingerprint=fingerprint_of(record),
                verdict=record.verdict,
                headline=record.headline,
                scope=record.scope,
                caveats=record.caveats,
                reasons=record.reasons,
                interrupted=record.interrupted,
                exports=record.exports,
            )
        )

    def note(self, text: str) -> None:
        self._say(events.Note(ts=utc_text_ms(), text=text))

    def _tell_held(self) -> None:
        if self._held is not None:
            self._say(self._held)
            self._held = None

    def _say(self, event: events.StreamEvent) -> None:
        self._console.json_line(event.model_dump(mode="json"))
