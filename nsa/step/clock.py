"""How long a step takes: wall time of exactly that step, on CUDA between events."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import torch


@dataclass(frozen=True, kw_only=True)
class Mark:
    """The end of a step. fetch_s: the seconds that it waited for data."""

    wall_s: float
    fetch_s: float
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None

    def seconds(self) -> float:
        """Duration of the step; on CUDA waits until the device has finished it."""
        if self.events is None:
            return self.wall_s
        begin, end = self.events
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000


class StepClock:
    """Steps follow each other without a gap: a step begins where the one before ended, so the
    writing of a row counts for the next step. `restart` leaves out evaluation and checkpoints.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._fetch_s = 0.0
        self._begin = 0.0
        self._event: torch.cuda.Event | None = None
        self.restart()

    def restart(self) -> None:
        """The next step begins now."""
        self._fetch_s = 0.0
        self._event = self._record()
        self._begin = perf_counter()

    @contextmanager
    def fetching(self) -> Iterator[None]:
        """Count the enclosed time as waiting for data."""
        begin = perf_counter()
        try:
            yield
        finally:
            self._fetch_s += perf_counter() - begin

    def tick(self) -> Mark:
        """The step ends here, the next one begins."""
        event, now = self._record(), perf_counter()
        wall = now - self._begin
        mark = Mark(
            wall_s=wall,
            fetch_s=self._fetch_s,
            events=(self._event, event) if self._event and event else None,
        )
        self._fetch_s = 0.0
        self._begin, self._event = now, event
        return mark

    def _record(self) -> torch.cuda.Event | None:
        if not self._cuda:
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
