"""Two clocks of a launch: a rank's time of day, and the time in which the harness itself ran.

A harness does not run while it is stopped (Ctrl-Z), or frozen with its container. Its monotonic
clock goes on then, as those of the ranks do. While the machine is asleep that clock stands still
for all of them: no time is missing, and none may be given back. The wall clock counts the sleep.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

# A clock that is set, and a machine that pauses, make one arrival late or early, and not so many
# that follow each other.
_IN_A_ROW = 8
# Fewer arrivals than these show nothing.
_LEAST = 3
# Looks at a launch are a tenth of a second apart; a busy machine is late by less than this.
_LATE_S = 5.0


@dataclass(kw_only=True)
class WallGap:
    """Of the arrivals of a rank's lines: this machine's wall clock less the time that they bear.

    A line arrives right after it was written, or late; so of some arrivals in a row the nearest
    counts, and of all such rows the farthest. Memory does not grow with the arrivals.
    """

    _farthest: float | None = None
    _nearest: float = 0.0
    _count: int = 0

    def arrived(self, said: float, now: float) -> None:
        """A line that bears the time `said` arrives at `now`, both in s since 1970."""
        gap = now - said
        if not self._count or abs(gap) < abs(self._nearest):
            self._nearest = gap
        self._count += 1
        if self._count == _IN_A_ROW:
            if self._farthest is None or abs(self._nearest) > abs(self._farthest):
                self._farthest = self._nearest
            self._count = 0

    @property
    def seconds(self) -> float | None:
        """s; positive where the rank's clock is behind. None where too few lines arrived."""
        if self._farthest is not None:
            return self._farthest
        return self._nearest if self._count >= _LEAST else None


class Presence:
    """Told of every look at a launch, it knows of those between which nobody was there.

    Only this process's own clocks count, nothing that a trainer writes: time in which this process
    computed, as over long files, is not away. `away_s` is the sum, s.
    """

    def __init__(self) -> None:
        self.away_s = 0.0
        self._looked_at: tuple[float, float] | None = None

    def look(self) -> float:
        """Seconds away since the last look, beyond what is usual; 0 if somebody was there."""
        now = time.monotonic(), time.process_time()
        before, self._looked_at = self._looked_at or now, now
        clock_s, computed_s = (b - a for a, b in zip(before, now, strict=True))
        gap_s = clock_s - computed_s
        if gap_s <= _LATE_S:
            return 0.0
        self.away_s += gap_s
        return gap_s
