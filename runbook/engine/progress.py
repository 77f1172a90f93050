"""An observer in front of another that says how long the rest takes, once some steps are done.

Told again after each phase that trained. A planned launch that would exceed its own time limit is
named at once, with the setting to change.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from runbook.config.profile import Profile
from runbook.engine.forecast import Pace, forecast, remaining, too_long
from runbook.launch.observer import Observer
from runbook.records import Launch, LaunchResult, PhaseRecord, RunRecord
from runbook.records.measurement import duration_text

# The first steps allocate, compile and rebuild buckets; they are no pace.
_SKIPPED_STEPS = 3
# Enough steps and time for a clock that looks ten times a second.
_FEWEST_STEPS = 5
_LEAST_S = 1.0


class Forecaster(Observer):
    """Passes every event on, and adds notes.

    `planned` are all launches of the run in their order, those that had ended before a resume left
    out.
    """

    def __init__(
        self,
        inner: Observer,
        planned: Sequence[Launch],
        profile: Profile,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._inner, self._profile, self._clock = inner, profile, clock
        self._left = {(launch.phase, launch.name): launch for launch in planned}
        self._pace: Pace | None = None
        self._began = 0.0
        self._first: tuple[int, float] | None = None
        self._startup_s: float | None = None
        self._now: tuple[Launch, int] | None = None

    def launch_started(self, launch: Launch, attempt: int) -> None:
        """A new clock for each attempt."""
        self._began, self._first, self._startup_s = self._clock(), None, None
        self._now = (launch, 0)
        self._inner.launch_started(launch, attempt)

    def launch_progress(
        self, launch: Launch, step: int, total: int, toks_per_s: float | None
    ) -> None:
        """Take the pace of the first launch that has done some steps."""
        self._now = (launch, step)
        self._inner.launch_progress(launch, step, total, toks_per_s)
        if self._pace is None and launch.kind == "trainer":
            self._measure(launch, step)

    def _measure(self, launch: Launch, step: int) -> None:
        now = self._clock()
        if step >= 1 and self._startup_s is None:
            self._startup_s = now - self._began
        if step <= _SKIPPED_STEPS:
            return
        if self._first is None:
            self._first = (step, now)
            return
        steps, seconds = step - self._first[0], now - self._first[1]
        if steps < _FEWEST_STEPS or seconds < _LEAST_S:
            return
        self._take(launch, seconds / steps)

    def _take(self, launch: Launch, step_s: float) -> None:
        self._pace = Pace(step_s=step_s, startup_s=self._startup_s or 0.0, launch=launch)
        self._tell()
        for planned in self._left.values():
            seconds = forecast(planned, self._pace, self._profile)
            if seconds is not None and (text := too_long(planned, seconds)):
                self._inner.note(f"{text} ({self._pace})")

    def _tell(self) -> None:
        if self._pace is None:
            return
        seconds, unknown = remaining(list(self._left.values()), self._pace, self._profile)
        if self._now is not None and self._now[0].kind == "trainer":
            launch, step = self._now
            share = step / launch.steps if launch.steps else 0.0
            seconds -= min(share, 1.0) * (forecast(launch, self._pace, self._profile) or 0.0)
        if seconds <= 0.0:
            return
        tests = f", {unknown} launch(es) that train nothing not counted" if unknown else ""
        self._inner.note(f"about {duration_text(seconds)} left, from {self._pace}{tests}")

    def launch_finished(self, launch: Launch, result: LaunchResult) -> None:
        """It is no longer left."""
        self._left.pop((launch.phase, launch.name), None)
        self._now = None
        self._inner.launch_finished(launch, result)

    def phase_finished(self, record: PhaseRecord) -> None:
        """What is left after a phase; launches that were not started are not."""
        self._left = {key: one for key, one in self._left.items() if key[0] != record.name}
        self._inner.phase_finished(record)
        if any(entry.launch.kind == "trainer" for entry in record.launches):
            self._tell()

    def run_started(self, run_id: str, run_root: str, phases: tuple[str, ...]) -> None:
        """Passed on."""
        self._inner.run_started(run_id, run_root, phases)

    def phase_started(self, name: str, title: str, launches: int) -> None:
        """Passed on."""
        self._inner.phase_started(name, title, launches)

    def run_finished(self, record: RunRecord, run_root: str) -> None:
        """Passed on."""
        self._inner.run_finished(record, run_root)

    def note(self, text: str) -> None:
        """Passed on."""
        self._inner.note(text)
