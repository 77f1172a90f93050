"""What an inspection says: a closed set of remarks, and the facts that they rest on."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from runbook.records.measurement import json_ready


class RemarkCode(StrEnum):
    """Why something is suspicious, or why nothing can be said."""

    MIXED_RUNS = "mixed_runs"
    STEPS_NOT_INCREASING = "steps_not_increasing"
    WARMUP_IN_WINDOW = "warmup_in_window"
    MEAN_OF_RATES = "mean_of_rates"
    RATE_DOES_NOT_FOLLOW = "rate_does_not_follow"
    BELOW_FLOOR = "below_floor"
    NON_FINITE = "non_finite"
    TORN_ROWS = "torn_rows"
    UNREADABLE = "unreadable"
    OTHER_RUN = "other_run"
    SILENT_RANK = "silent_rank"
    MISSING_RANK = "missing_rank"
    FAILED_EXIT = "failed_exit"
    CLOCK_BACK = "clock_back"
    ROWS_AND_HEARTBEATS = "rows_and_heartbeats"
    HALTED = "halted"
    WINDOW_TOO_SHORT = "window_too_short"
    NOTHING_FOUND = "nothing_found"


# These say that evidence is missing, not that what is there is wrong.
UNDECIDED = frozenset({RemarkCode.WINDOW_TOO_SHORT, RemarkCode.NOTHING_FOUND})


@dataclass(frozen=True, kw_only=True)
class Remark:
    """One thing that a reader should know before believing a number of this directory."""

    code: RemarkCode
    message: str
    path: str

    @property
    def suspicious(self) -> bool:
        """False for remarks that only say what is missing."""
        return self.code not in UNDECIDED


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One run inside a file: rows whose steps increase. `every` is the steps between two rows."""

    index: int
    rows: int
    first_step: int
    last_step: int
    every: int
    warmup_rows: int
    arms: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Statistic:
    """A number with its window, as found; `steps` is None where the rows are of several runs."""

    name: str
    value: float
    stdev: float | None
    unit: str
    n: int
    first_step: int
    last_step: int
    runs: int = 1
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class RowsFacts:
    """A training.csv: its form, its runs, and what can be computed from it."""

    path: str
    sha256: str
    legacy: bool
    rows: int
    dropped_rows: int
    segments: tuple[Segment, ...]
    statistics: tuple[Statistic, ...]
    window_steps_available: int


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """A heartbeat file: whose it is, how far it goes, and its longest silence."""

    rank: int
    path: str
    lines: int
    torn_lines: int
    tokens: tuple[str, ...]
    pids: tuple[int, ...]
    first_step: int | None
    last_step: int | None
    last_event: str
    exit_code: int | None
    longest_silence_s: float | None
    last_ts: float | None


@dataclass(frozen=True, kw_only=True)
class RunDirectory:
    """One directory that holds rows or heartbeats."""

    path: str
    training: RowsFacts | None
    ranks: tuple[RankFacts, ...]
    world_size: int | None
    loss_floor: float | None
    loss_floor_source: str
    remarks: tuple[Remark, ...]


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """Everything found under one path."""

    path: str
    directories: tuple[RunDirectory, ...]
    remarks: tuple[Remark, ...]

    @property
    def exit_code(self) -> int:
        """0 nothing suspicious, 1 something suspicious, 3 too little evidence to say."""
        if any(remark.suspicious for remark in self.remarks):
            return 1
        return 3 if self.remarks else 0

    def document(self) -> dict[str, Any]:
        """For `runbook inspect --json`; NaN and infinities become words."""
        found: dict[str, Any] = json_ready(asdict(self))
        return {"schema_version": 1, "exit_code": self.exit_code, **found}
