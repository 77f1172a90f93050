"""How far a rank's wall clock is from the one of the machine that it runs on."""

from __future__ import annotations

from dataclasses import dataclass

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
