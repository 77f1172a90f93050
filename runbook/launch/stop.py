"""A request to stop, made by a signal and honoured at the next safe point."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Interrupted", "StopRequest", "stop_on_signals"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """Raised where waiting for a safe point would take too long; not caught by `Exception`."""


class StopRequest:
    """Set once by a signal. Inside `deferred()` the signal is only noted, outside it raises."""

    def __init__(self) -> None:
        self.requested = ""
        self._deferred = 0

    def request(self, name: str) -> None:
        """Ask to stop; the first request gives the name."""
        self.requested = self.requested or name

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """A section that looks at `requested` itself, or is short and must be finished."""
        self._deferred += 1
        try:
            yield
        finally:
            self._deferred -= 1

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """The signal handler."""
        self.request(signal.Signals(number).name)
        if not self._deferred:
            raise Interrupted(self.requested)


@contextmanager
def stop_on_signals(stop: StopRequest) -> Iterator[StopRequest]:
    """Route SIGINT and SIGTERM into `stop`; the handlers of before are put back at the end.

    Only possible in the main thread; elsewhere `ValueError` is raised by Python itself.
    """
    before = {number: signal.signal(number, stop.handle) for number in _SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
