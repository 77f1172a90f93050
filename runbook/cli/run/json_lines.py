"""A run for a program: each event one JSON line on stdout, as docs/events.schema.json says."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

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
        self._held: events.StreamEvent | None = None
        self._forecast_at = -math.inf
        self._shape: tuple[object, ...] = ()

    def _announce(self, run_id: str) -> None:
        place = {"run_id": run_id, "run_root": self.run_root}
        self._say(_told(events.RunStarted, **place, phases=self._order))

    def phase_started(self, name: str, title: str, launches: int) -> None:
        self._say(_told(events.PhaseStarted, phase=name, title=title, launches=launches))

    def launch_started(self, launch: Launch, attempt: int) -> None:
        self._tell_held()
        self._step_at, self._shape = -math.inf, ()
        command = launch.command_line()
        self._say(_of(launch, events.LaunchStarted, launch, attempt=attempt, command=command))

    def launch_progress(
        self, launch: Launch, step: int, total: int, toks_per_s: float | None
    ) -> None:
        rate = toks_per_s if toks_per_s is not None and math.isfinite(toks_per_s) else None
        event = _of(launch, events.LaunchProgress, step=step, total=total, toks_per_s=rate)
        now = self._clock()
        if now < self._step_at + _STEP_EVERY_S:
            self._held = event
            return
        self._step_at, self._held = now, None
        self._say(event)

    def launch_ranks(self, launch: Launch, pulse: Pulse) -> None:
        if pulse.shape != self._shape:
            self._shape = pulse.shape
            silent = [asdict(one) for one in pulse.silent]
            self._say(_of(launch, events.LaunchRanks, pulse, silent=silent))

    def run_forecast(self, forecast: Forecast) -> None:
        now = self._clock()
        if now >= self._forecast_at + _FORECAST_EVERY_S:
            self._forecast_at = now
            self._say(_told(events.RunForecast, forecast))

    def launch_finished(self, launch: Launch, result: LaunchResult) -> None:
        self._tell_held()
        self._say(_of(launch, events.LaunchFinished, result=result))

    def phase_finished(self, record: PhaseRecord) -> None:
        self._say(_told(events.PhaseFinished, record, phase=record.name))

    def run_finished(self, record: RunRecord, run_root: str) -> None:
        self.run_root = run_root
        fingerprint = fingerprint_of(record)
        self._say(_told(events.RunFinished, record, run_root=run_root, fingerprint=fingerprint))

    def note(self, text: str) -> None:
        self._say(_told(events.Note, text=text))

    def _tell_held(self) -> None:
        if self._held is not None:
            self._say(self._held)
            self._held = None

    def _say(self, event: events.StreamEvent) -> None:
        self._console.json_line(event.model_dump(mode="json"))


def _told(
    kind: type[events.StreamEvent], source: object = None, **fields: Any
) -> events.StreamEvent:
    """The event now; `source` has what is not given by name."""
    rest = [name for name, one in kind.model_fields.items() if one.is_required()]
    taken = {name: getattr(source, name) for name in rest if name not in ("ts", *fields)}
    return kind(ts=utc_text_ms(), **taken, **fields)


def _of(
    launch: Launch, kind: type[events.StreamEvent], source: object = None, **fields: Any
) -> events.StreamEvent:
    return _told(kind, source, phase=launch.phase, launch=launch.name, **fields)
