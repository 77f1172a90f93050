"""How long a step takes: wall time of exactly that step, on CUDA between events."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import torch

PARTS = ("fetch", "forward", "backward", "optimizer", "wait")


@dataclass(frozen=True, kw_only=True)
class Mark:
    """The end of a step. host_s: the host's seconds outside all `PARTS`."""

    wall_s: float
    fetch_s: float
    host_s: float
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
        self._parts = dict.fromkeys(PARTS, 0.0)
        self._begin = 0.0
        self._event: torch.cuda.Event | None = None
        self.restart()

    def restart(self) -> None:
        """The next step begins now."""
        self._parts = dict.fromkeys(PARTS, 0.0)
        self._event = self._record()
        self._begin = perf_counter()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the enclosed time as a part of the step."""
        begin = perf_counter()
        try:
            yield
        finally:
            self._parts[name] += perf_counter() - begin

    def tick(self) -> Mark:
        """The step ends here, the next one begins."""
        event, now = self._record(), perf_counter()
        wall = now - self._begin
        mark = Mark(
            wall_s=wall,
            fetch_s=self._parts["fetch"],
            host_s=max(0.0, wall - sum(self._parts.values())),
            events=(self._event, event) if self._event and event else None,
        )
        self._parts = dict.fromkeys(PARTS, 0.0)
        self._begin, self._event = now, event
        return mark

    def _record(self) -> torch.cuda.Event | None:
        if not self._cuda:
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
