"""Clocks of a rank against its machine's: its time of day, its monotonic and its processor time."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from runbook.process.ended import processor_s

# A clock that is set, and a machine that pauses, make one arrival late or early, and not so many
# that follow each other.
_IN_A_ROW = 8
# Fewer arrivals than these show nothing.
_LEAST = 3


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


@dataclass(kw_only=True)
class Leeway:
    """How one clock of a rank may stand to the same clock read here, from when its lines arrived.

    A line that one look did not find and the next one did was written between the two. Of lines
    that arrive together, each but the first bears a time after the writing of the one before, and
    each one a time before the look that found it. Both hold however busy the machine is, so no
    room is needed for pauses. `first` is 0 for a clock that stands still in a pause: then the first
    line counts too. Memory does not grow with the arrivals.
    """

    first: int = 1
    _least_s: float = -math.inf
    _most_s: float = math.inf
    _lines: int = 0
    _early: float | None = None
    _last: float | None = None

    def take(self, told: float | None) -> None:
        """The next line that a look found bears this time, s by the rank; None for no time."""
        if told is not None:
            if self._lines >= self.first and self._early is None:
                self._early = told
            self._last = told
        self._lines += 1

    def looked(self, since: float | None, now: float | None) -> None:
        """That look is over. `since` and `now` are readings here, s, None where there was none:
        when the look before began, and when this one was over.
        """
        if self._early is not None and since is not None:
            self._least_s = max(self._least_s, since - self._early)
        if self._last is not None and now is not None:
            self._most_s = min(self._most_s, now - self._last)
        self._lines, self._early, self._last = 0, None, None

    @property
    def apart_s(self) -> float | None:
        """By so many s the clock goes otherwise than any one offset allows; 0 or less where one
        does. None where too little arrived.
        """
        apart_s = self._least_s - self._most_s
        return apart_s if math.isfinite(apart_s) else None


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Both clocks of a process of this machine, s: the monotonic one, its processor time."""

    mono: float
    cpu: float | None

    @classmethod
    def of(cls, pid: int | None) -> Reading:
        """As they are now; without processor time where no process is known, or it is gone."""
        cpu = None if pid is None else processor_s(pid)
        return cls(mono=time.monotonic(), cpu=cpu)
