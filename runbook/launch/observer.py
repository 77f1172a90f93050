"""The two lines between a run and whoever started it: what is told, and the request to stop.

A request is made by a signal and honoured at the next safe point.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from runbook.records import Launch, LaunchResult, PhaseRecord, RunRecord
from runbook.records.events import Forecast, Pulse

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Observer:
    """Progress of one run, told in order. An observer decides nothing and must not block.

    This one says nothing; others override the events that they care about.
    """

    def run_started(self, run_id: str, run_root: str, phases: tuple[str, ...]) -> None:
        """A run folder exists now."""

    def phase_started(self, name: str, title: str, launches: int) -> None:
        """The phase's plan is known, nothing of it has run."""

    def launch_started(self, launch: Launch, attempt: int) -> None:
        """Processes of this launch are being started; attempts count from 1."""

    def launch_progress(
        self, launch: Launch, step: int, total: int, toks_per_s: float | None
    ) -> None:
        """Rank 0 has done `step` of `total` steps."""

    def launch_ranks(self, launch: Launch, pulse: Pulse) -> None:
        """The launch still runs, and this is what its heartbeats say; told twice a second."""

    def launch_finished(self, launch: Launch, result: LaunchResult) -> None:
        """Nothing of this launch is alive any more."""

    def run_forecast(self, forecast: Forecast) -> None:
        """How far the run is by now; told at most once a second while a launch runs."""

    def phase_finished(self, record: PhaseRecord) -> None:
        """The phase is judged and written."""

    def run_finished(self, record: RunRecord, run_root: str) -> None:
        """Everything is written."""

    def note(self, text: str) -> None:
        """Something a person should read."""


class Interrupted(BaseException):
    """Raised where waiting for a safe point would take too long; not caught by `Exception`."""


class StopRequest:
    """Set once by a signal, which is only noted unless it comes inside `interruptible()`."""

    def __init__(self) -> None:
        self.requested = ""
        self._raises = False

    def request(self, name: str) -> None:
        """Ask to stop; the first request gives the name."""
        self.requested = self.requested or name

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """A section that may take long and leaves nothing half done: a signal raises in it."""
        if self.requested:
            raise Interrupted(self.requested)
        with self._mode(raises=True):
            yield

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside an interruptible section: a part that looks at `requested` itself."""
        with self._mode(raises=False):
            yield

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """The signal handler."""
        self.request(signal.Signals(number).name)
        if self._raises:
            raise Interrupted(self.requested)

    @contextmanager
    def _mode(self, *, raises: bool) -> Iterator[None]:
        before, self._raises = self._raises, raises
        try:
            yield
        finally:
            self._raises = before


@contextmanager
def stop_on_signals(stop: StopRequest) -> Iterator[StopRequest]:
    """Route SIGINT, SIGTERM and SIGHUP into `stop`; the handlers of before are put back at the end.

    A terminal that is closed sends SIGHUP, which `nohup` has ignored: then it stays ignored.
    Only possible in the main thread; elsewhere `ValueError` is raised by Python itself.
    """
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    numbers = [one for one in _SIGNALS if not (ignored and one is signal.SIGHUP)]
    before = {number: signal.signal(number, stop.handle) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
