"""What a rank of a launch said last, and how its clocks stand to those of its machine."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nsa.contract import Event, Phase
from runbook.folder.launch import Exit, event_of, is_of_training, step_of
from runbook.folder.launch.shapes import is_number
from runbook.process import process_state, processor_s

# Pauses between arrivals that are remembered, and how many of them make a usual one.
_PAUSES = 16
_FEWEST_PAUSES = 3
# Rates and records that are remembered.
_RATES, _RECORDS = 50, 10
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


@dataclass(kw_only=True)
class RankState:
    """What one rank said last, and its process. Times are on the harness's monotonic clock.

    `step` is the last one said, `last_step` the last one of the training itself; `mono` and `ts`
    are the rank's own clocks. `away_s`: so long was the harness away before the rank's first word
    or after its last. `for_all`: it is the one voice of a launch of several ranks.
    """

    rank: int
    path: Path
    for_all: bool = False
    event: str = ""
    phase: str = Phase.INIT
    step: int = 0
    last_step: int | None = None
    mono: float | None = None
    ts: float | None = None
    exit: Exit | None = None
    pid: int | None = None
    foreign_pid: int | None = None
    # The launch's own process was seen here: it has this machine's clocks.
    on_this_machine: bool = False
    handle: int | None = None
    # What its node says of its process, where that is another machine: see `process_state`.
    told_state: str | None = None
    died_at: float | None = None
    parent_saw: int | None = None
    changed_at: float = 0.0
    phase_since: float = 0.0
    toks_per_s: float | None = None
    longest_step_s: float = 0.0
    step_started_mono: float | None = None
    recent: deque[Mapping[str, Any]] = field(default_factory=lambda: deque(maxlen=_RECORDS))
    # The newest record of each event, and the rates of the newest steps, tok/s.
    latest: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=_RATES))
    # (this process's clock, the rank's) at the first and the latest arrival of ended steps.
    first_arrival: tuple[float, float] | None = None
    last_arrival: tuple[float, float] | None = None
    # Of its monotonic clock and its processor time, and what these were here at the last look.
    mono_leeway: Leeway = field(default_factory=Leeway)
    cpu_leeway: Leeway = field(default_factory=lambda: Leeway(first=0))
    looked: Reading | None = None
    # Of its wall clock: as seen here, and as its node tells it, where that is another machine.
    wall_gap: WallGap = field(default_factory=WallGap)
    elsewhere: bool = False
    told_gap_s: float | None = None
    # By the name of a file: how many steps it was behind its rank's word.
    late_rows: dict[str, int] = field(default_factory=dict)
    steps_ended: int = 0
    away_s: float = 0.0
    _step_ended: bool = False
    _spoke: bool = False
    _pauses: deque[float] = field(default_factory=lambda: deque(maxlen=_PAUSES))

    def take(self, record: Mapping[str, Any]) -> None:
        """Fold one record of this launch in."""
        event = event_of(record)
        self.event = event or ""
        self.phase = str(record.get("phase") or self.phase)
        self.mono = _finite(record.get("mono"), self.mono)
        self.ts = _finite(record.get("ts"), self.ts)
        if (step := step_of(record)) is not None:
            self.step = step
            self.last_step = step if is_of_training(event) else self.last_step
        if event == Event.EXIT:
            self.exit = Exit.told_by(record)
        self.mono_leeway.take(_finite(record.get("mono"), None))
        self.cpu_leeway.take(_finite(record.get("cpu_s"), None))
        self._spoke = True
        self.recent.append(record)
        self.latest[self.event] = record
        rate = record.get("toks_per_s")
        if self.event == Event.PROGRESS and isinstance(rate, int | float):
            self.toks_per_s = float(rate)
            if rate > 0:
                self.rates.append(float(rate))
        if self.mono is None:
            return
        if self.event == Event.STEP_START:
            self.step_started_mono = self.mono if self.phase != Phase.FIRST_STEP else None
        self._step_ended = self._step_ended or self.event == Event.STEP_END
        self.steps_ended += self.event == Event.STEP_END
        if self.event == Event.STEP_END and self.step_started_mono is not None:
            self.longest_step_s = max(self.longest_step_s, self.mono - self.step_started_mono)
            self.step_started_mono = None

    def arrived(self, now: float, *, punctual: bool = True) -> None:
        """What was read since the last call has arrived by `now`, s on this process's clock.

        If that is not `punctual`, it may have come long before.
        """
        self._pauses.append(now - self.changed_at)
        self.changed_at = now
        if punctual and self._step_ended and self.mono is not None:
            self.last_arrival = (now, self.mono)
            self.first_arrival = self.first_arrival or self.last_arrival
        if self._spoke and self.ts is not None:
            self.wall_gap.arrived(self.ts, time.time())
        self._step_ended = self._spoke = False

    def looked_at(self, before: Reading, now: Reading, *, trained: bool) -> None:
        """A look from `before` to `now` is over. What a rank said before it had `trained` may have
        been written later, and the clocks of another machine are other clocks.
        """
        known = trained and self.on_this_machine
        for leeway, name in ((self.mono_leeway, "mono"), (self.cpu_leeway, "cpu")):
            since = getattr(self.looked, name, None)
            leeway.looked(since if known else None, getattr(now, name) if known else None)
        self.looked = before

    @property
    def usual_s(self) -> float | None:
        """The median of its last pauses between arrivals, s; None before there are enough."""
        return statistics.median(self._pauses) if len(self._pauses) >= _FEWEST_PAUSES else None

    def clocks(self) -> dict[str, float]:
        """Seconds of its steps by both clocks and how far its wall clock is off, for `RankExit`."""
        found = {"away_s": round(self.away_s, 3)} if self.away_s else {}
        if (gap := self.gap_s) is not None:
            found["wall_gap_s"] = round(gap, 3)
        for name, leeway in (("apart_s", self.mono_leeway), ("cpu_apart_s", self.cpu_leeway)):
            if (apart := leeway.apart_s) is not None:
                found[name] = round(apart, 4)
        if self.first_arrival is None or self.last_arrival is None:
            return found
        watched, said = (b - a for a, b in zip(self.first_arrival, self.last_arrival, strict=True))
        return {**found, "watched_s": round(watched, 3), "said_s": round(said, 3)}

    @property
    def gap_s(self) -> float | None:
        """How far its wall clock is behind that of its machine, s; None where nobody knows."""
        return self.told_gap_s if self.elsewhere else self.wall_gap.seconds

    @property
    def process_state(self) -> str:
        """The kernel's one-letter state of its process; empty if it cannot be known."""
        return process_state(self.pid) if self.told_state is None else self.told_state

    @property
    def exit_code(self) -> int | None:
        """The code that it said as its last word."""
        return self.exit.code if self.exit else None

    @property
    def exit_reason(self) -> str:
        """Why, as it said; empty if it said nothing."""
        return self.exit.reason if self.exit else ""

    @property
    def ended(self) -> bool:
        """The rank has said its exit, or its process is gone."""
        return self.exit is not None or self.died_at is not None


def _finite(value: Any, before: float | None) -> float | None:
    """A reading of a clock; the one before where it is none."""
    return float(value) if is_number(value) else before
