"""What an inspection says: a closed set of remarks, the facts that they rest on, and the text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from runbook.console import table_of
from runbook.errors import how_many
from runbook.records.measurement import Measurement, Record, json_ready

if TYPE_CHECKING:
    from rich.console import RenderableType


class RemarkCode(StrEnum):
    """Why something is suspicious, or why nothing can be said."""

    MIXED_RUNS = "mixed_runs"
    STEPS_NOT_INCREASING = "steps_not_increasing"
    WARMUP_IN_WINDOW = "warmup_in_window"
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
    UNBALANCED = "unbalanced"
    MISSING_STEPS = "missing_steps"
    TOKENS_CHANGE = "tokens_change"
    CONSTANT_COLUMN = "constant_column"
    HALTED = "halted"
    WINDOW_TOO_SHORT = "window_too_short"
    NO_SECOND_SOURCE = "no_second_source"
    NOTHING_FOUND = "nothing_found"
    PLANNED = "planned"


# These say that evidence is missing, not that what is there is wrong.
UNDECIDED = frozenset(
    {RemarkCode.WINDOW_TOO_SHORT, RemarkCode.NO_SECOND_SOURCE, RemarkCode.NOTHING_FOUND}
)


class Remark(Record):
    """One thing that a reader should know before believing a number of this directory."""

    code: RemarkCode
    message: str
    path: str

    @property
    def suspicious(self) -> bool:
        """False for what was planned so, and for remarks that only say what is missing."""
        return self.code not in UNDECIDED and self.code is not RemarkCode.PLANNED


# What was noticed in a file that the caller names.
Found = tuple[RemarkCode, str]


def remarks_on(path: str, found: Iterable[Found]) -> list[Remark]:
    """What was found in one file."""
    return [Remark(code=code, message=text, path=path) for code, text in found]


class Segment(Record):
    """One run inside a file: rows whose steps increase. `every` is the steps between two rows."""

    index: int
    rows: int
    first_step: int
    last_step: int
    every: int
    warmup_rows: int
    arms: tuple[str, ...] = ()


class RowsFacts(Record):
    """A training.csv: its form, its runs, and what can be computed from it."""

    path: str
    sha256: str
    legacy: bool
    rows: int
    dropped_rows: int
    segments: tuple[Segment, ...]
    statistics: tuple[Measurement, ...]
    window_steps_available: int


class RankFacts(Record):
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


class RunDirectory(Record):
    """One directory that holds rows or heartbeats."""

    path: str
    training: RowsFacts | None
    ranks: tuple[RankFacts, ...]
    world_size: int | None
    loss_floor: float | None
    loss_floor_source: str


class Inspection(Record):
    """Everything found under one path."""

    path: str
    directories: tuple[RunDirectory, ...]
    remarks: tuple[Remark, ...]

    @property
    def exit_code(self) -> int:
        """0 nothing suspicious, 1 something suspicious, 3 too little evidence to say."""
        if any(remark.suspicious for remark in self.remarks):
            return 1
        return 3 if any(remark.code in UNDECIDED for remark in self.remarks) else 0

    def document(self) -> dict[str, Any]:
        """For `runbook inspect --json`; NaN and infinities become words."""
        found: dict[str, Any] = json_ready(self.model_dump())
        return {"schema_version": 2, "exit_code": self.exit_code, **found}


def inspection_parts(inspection: Inspection) -> Iterator[RenderableType]:
    """What was found, what it measures, and what is suspicious about it."""
    for one in inspection.directories:
        yield from (*_directory(inspection.path, one), "")
    suspicious = [remark for remark in inspection.remarks if remark.suspicious]
    undecided = [remark for remark in inspection.remarks if remark.code in UNDECIDED]
    planned = [remark for remark in inspection.remarks if remark.code is RemarkCode.PLANNED]
    for title, remarks in (
        ("as planned", planned),
        ("suspicious", suspicious),
        ("too little to say", undecided),
    ):
        if remarks:
            yield title
            yield table_of((), [(f"  {one.code}", f"{one.path}: {one.message}") for one in remarks])
    yield _conclusion(len(suspicious), len(undecided), read=bool(inspection.directories))


def _conclusion(suspicious: int, undecided: int, *, read: bool) -> str:
    if suspicious:
        things = how_many(suspicious, "suspicious thing")
        them = "it" if suspicious == 1 else "them"
        return f"{things}: quote no number of this run without {them}"
    if not read:
        return "nothing was read, so nothing is known of it"
    if undecided:
        return "nothing suspicious, but too little evidence to believe it"
    return "nothing suspicious"


def _directory(root: str, one: RunDirectory) -> list[str]:
    lines = [root if one.path == "." else f"{root.rstrip('/')}/{one.path}"]
    if one.training:
        lines += _rows(one.training)
    lines += [f"  {_rank(facts)}" for facts in one.ranks]
    return lines


def _rows(facts: RowsFacts) -> list[str]:
    form = "no header, step,loss,lr,toks_per_s" if facts.legacy else "with header"
    name = facts.path.rpartition("/")[2]
    runs = how_many(len(facts.segments), "run")
    dropped = f", {facts.dropped_rows} dropped" if facts.dropped_rows else ""
    lines = [f"  {name}  {form}; {facts.rows} rows{dropped}, {runs}; sha256 {facts.sha256[:12]}"]
    for one in facts.segments[:12]:
        every = f", one per {one.every} steps" if one.every > 1 else ""
        arms = f", arms {', '.join(one.arms)}" if one.arms else ""
        lines.append(
            f"    run {one.index}  steps {one.first_step}-{one.last_step}  {one.rows} rows{every}"
            f", {one.warmup_rows} of them warm-up{arms}"
        )
    if len(facts.segments) > 12:
        lines.append(f"    and {len(facts.segments) - 12} more")
    said = ((number, f"; {number.note}" if number.note else "") for number in facts.statistics)
    lines += [f"    {number.name}  {number}{note}" for number, note in said]
    lines.append(
        f"    usable rows in the last 50 steps of the last run: {facts.window_steps_available}"
    )
    return lines


def _rank(facts: RankFacts) -> str:
    silence, code = facts.longest_silence_s, facts.exit_code
    parts = [
        f"{facts.lines} lines",
        "" if facts.last_step is None else f"steps {facts.first_step}-{facts.last_step}",
        "" if silence is None else f"longest silence {silence:.3g} s",
        f"last line {facts.last_event!r}" if facts.last_event else "",
        "" if code is None else f"exit code {code}",
    ]
    return f"{facts.path.rpartition('/')[2]}  {', '.join(part for part in parts if part)}"
