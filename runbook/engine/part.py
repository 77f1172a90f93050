"""A run in parts: each ends by itself within its time, and `--resume` goes on with the next."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from runbook.launch import StopRequest
from runbook.records import Launch, LaunchEntry

# What stands in the record where a signal's name would.
TIME_LIMIT = "the time limit of this part"
PREEMPTION = "the pre-emption of its trainer"
# A run that ended so is INCOMPLETE, and no signal's number is its exit code.
NO_SIGNAL = (TIME_LIMIT, PREEMPTION)


@dataclass(kw_only=True)
class Part:
    """The time that this part of a run has, from when the object was made; None for no limit."""

    limit_s: float | None = None
    began: float = field(default_factory=time.monotonic)
    started_any: bool = False

    @property
    def left_s(self) -> float:
        """Seconds that are left; infinite without a limit."""
        if self.limit_s is None:
            return float("inf")
        return self.limit_s - (time.monotonic() - self.began)

    def has_time_for(
        self, launch: Launch, entries: Sequence[LaunchEntry], typical_s: float | None
    ) -> bool:
        """May this launch start, or would the limit only cut it off?

        The longest finished launch of as many steps says how long it takes, else `typical_s`; what
        nothing is known of is tried. The first launch of a part always starts: without that no
        part would ever go on with one that is longer than all of them.
        """
        if not self.started_any:
            return True
        alike = [
            entry.result.duration_s
            for entry in entries
            if entry.result.ok and entry.launch.steps == launch.steps
        ]
        return max(alike, default=typical_s or 0.0) <= self.left_s

    @contextmanager
    def ends(self, stop: StopRequest) -> Iterator[None]:
        """Ask to stop when the time is over, as a signal would."""
        if self.limit_s is None:
            yield
            return
        timer = threading.Timer(max(0.0, self.left_s), stop.request, (TIME_LIMIT,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
