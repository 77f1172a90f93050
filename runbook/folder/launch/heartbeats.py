"""heartbeat_rank*.jsonl: what one rank said about itself, and how it ended.

`RankFold` is the one fold over heartbeat records: a run that is watched, a run that is judged and
a directory of unknown origin are all read by it. `runbook.folder.history` keeps what a judge needs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsa.contract import HEARTBEATS, Event, ExitCode, Phase
from runbook.files import LARGEST_LOG_BYTES
from runbook.folder.launch.lines import LONGEST_LINE, WholeLines
from runbook.folder.launch.shapes import is_count, is_number

if TYPE_CHECKING:
    from runbook.folder.launch.columns import Bools, Columns, Floats, Ints

_MARK = -7_340_033
_BETWEEN = f",{_MARK},".encode()
_KNOWN = frozenset(Event)
STEPPING = frozenset({Event.STEP_START, Event.STEP_END, Event.PROGRESS})
# No training has more steps; a larger number is not one.
_MOST_STEPS = 2**53


@dataclass(kw_only=True)
class RankFold:
    """Who wrote a rank's heartbeats, how far they go, and how they end.

    `step` is the last one said; `first_step` and `last_step` are those of the training itself.
    Records of another trainer may have events of its own, `msg` for `event` or neither, no token
    and no monotonic clock.
    """

    rank: int
    events: int = 0
    unnamed: int = 0
    dropped: int = 0
    tokens: dict[str, None] = field(default_factory=dict)
    pids: dict[int, None] = field(default_factory=dict)
    other_ranks: set[int] = field(default_factory=set)
    event: str = ""
    phase: str = Phase.INIT
    step: int = 0
    first_step: int | None = None
    last_step: int | None = None
    steps_back: int = 0
    first_mono: float | None = None
    mono: float | None = None
    ts: float | None = None
    clock_back: int = 0
    wall_clock_back: int = 0
    silence_s: float | None = None
    exit_code: int | None = None
    exit_reason: str = ""
    steps_done: int | None = None
    damage: list[str] = field(default_factory=list)
    _writer: object = None

    def take_lines(self, block: bytes) -> None:
        """Fold whole lines in; those that hold no record are counted."""
        lines = [line for line in block.split(b"\n") if line.strip()]
        for record in _records(lines):
            if record is None:
                self.dropped += 1
            else:
                self.take(record)

    def take(self, record: Mapping[str, Any]) -> None:
        """Fold one record in; memory does not grow with the number of records."""
        self._take_speaker(record)
        self._take_clocks(record)
        self._take_step(record.get("step"))
        if self.event == Event.EXIT:
            code = whole_number(record.get("code"))
            # An exit that cannot say its code is no good exit.
            self.exit_code = ExitCode.CRASH if code is None else code
            self.exit_reason = str(record.get("reason") or "")
            self.steps_done = whole_number(record.get("steps_done"))

    def take_many(self, columns: Columns, lines: slice) -> None:
        """What `take` does with the record of each of these lines, none of which is an exit."""
        for form, count in columns.forms_in(lines):
            self._take_speaker(form.record, count)
        last = columns.forms[columns.form[lines][-1]].record
        self.event, self.phase = last["event"], last["phase"]
        writers = columns.each(lines, lambda record: record["pid"])
        self._take_clock_columns(
            columns.number("mono")[lines], columns.number("ts")[lines], writers
        )
        training = columns.each(lines, lambda record: _is_of_training(record["event"]))
        self._take_step_column(columns.number("step")[lines], training)

    def _take_speaker(self, record: Mapping[str, Any], count: int = 1) -> None:
        event = record.get("event", record.get("msg"))
        if isinstance(event, str):
            self.events += count
            self.event = event
        else:
            self.unnamed += count
            self.event = ""
        self.phase = str(record.get("phase") or self.phase)
        token, rank = record.get("token"), record.get("rank")
        if token is not None:
            self.tokens[str(token)] = None
        named = whole_number(rank)
        if named is not None and named != self.rank:
            self.other_ranks.add(named)
        if (pid := whole_number(record.get("pid"))) is not None:
            self.pids[pid] = None

    def _take_clocks(self, record: Mapping[str, Any]) -> None:
        writer: Any = record.get("pid")
        mono: Any = record.get("mono")
        now: Any = record.get("ts")
        if is_number(mono):
            # Each process counts from a beginning of its own, at least after a reboot.
            if self.mono is not None and writer == self._writer and mono < self.mono:
                self.clock_back += 1
            self.mono = float(mono)
            self.first_mono = self.mono if self.first_mono is None else self.first_mono
        self._writer = writer
        if is_number(now):
            if self.ts is not None:
                self.wall_clock_back += now < self.ts
                self.silence_s = max(self.silence_s or 0.0, now - self.ts)
            self.ts = float(now)

    def _take_clock_columns(self, mono: Floats, ts: Floats, writers: Ints) -> None:
        """`_take_clocks` of records that all have both clocks."""
        import numpy as np

        if self.mono is not None and int(writers[0]) == self._writer and mono[0] < self.mono:
            self.clock_back += 1
        same = writers[1:] == writers[:-1]
        self.clock_back += int(np.count_nonzero(same & (mono[1:] < mono[:-1])))
        self.first_mono = float(mono[0]) if self.first_mono is None else self.first_mono
        self.mono, self._writer = float(mono[-1]), int(writers[-1])
        pauses = np.diff(ts) if self.ts is None else np.diff(ts, prepend=self.ts)
        if len(pauses):
            self.wall_clock_back += int(np.count_nonzero(pauses < 0))
            self.silence_s = max(self.silence_s or 0.0, float(pauses.max()))
        self.ts = float(ts[-1])

    def _take_step_column(self, steps: Floats, training: Bools) -> None:
        """`_take_step` of records that all have a step; which of them are of the training."""
        import numpy as np

        self.steps_back += int(np.count_nonzero(np.diff(steps, prepend=self.step) < 0))
        self.step = int(steps[-1])
        if training.any():
            own = steps[training]
            lowest = int(own.min())
            self.first_step = lowest if self.first_step is None else min(self.first_step, lowest)
            self.last_step = int(own[-1])

    def _take_step(self, value: object) -> None:
        step = whole_number(value)
        if step is None or not 0 <= step <= _MOST_STEPS:
            return
        self.steps_back += step < self.step
        self.step = step
        if _is_of_training(self.event):
            self.first_step = step if self.first_step is None else min(self.first_step, step)
            self.last_step = step

    @property
    def clock_s(self) -> float | None:
        """Seconds from the first record to the last, on the rank's monotonic clock."""
        return None if self.mono is None else self.mono - (self.first_mono or 0.0)

    def strangers(self) -> list[str]:
        """What in the file is not the word of one process of this rank in one launch."""
        found = []
        if len(self.tokens) > 1:
            found.append(f"heartbeats of {len(self.tokens)} launches in one file")
        elif len(self.pids) > 1:
            pids = ", ".join(map(str, self.pids))
            found.append(f"heartbeats of {len(self.pids)} processes in one file: {pids}")
        if self.other_ranks:
            found.append(f"heartbeats of other ranks in the file: {sorted(self.other_ranks)}")
        return found


def fold_file(path: Path, fold: RankFold) -> tuple[str, int]:
    """Fold a whole file in; its digest, and the length of a torn last line."""
    lines = WholeLines(path)
    for block in lines:
        fold.take_lines(block)
    fold.damage += lines.problems
    return lines.sha256, lines.torn_bytes


def heartbeats_in(path: Path) -> Iterator[Mapping[str, Any]]:
    """The readable records of a file, one by one. Raises `OSError`."""
    with path.open("rb") as stream:
        while (line := stream.readline(LONGEST_LINE)) and stream.tell() <= LARGEST_LOG_BYTES:
            record = parse_heartbeat(line) if line.endswith(b"\n") else None
            if record is not None:
                yield record


def parse_heartbeat(line: bytes) -> Mapping[str, Any] | None:
    """The record of a complete line, or None if it is no JSON object."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def whole_number(value: object) -> int | None:
    """The value if it is an integer of 64 bits; JSON's true and false are none."""
    return value if isinstance(value, int) and is_count(value) else None


def _is_of_training(event: str) -> bool:
    """Whether an event tells the step of the training: also one of another trainer's own."""
    return event in STEPPING or event not in _KNOWN


def heartbeat_files(run_dir: Path) -> dict[int, Path]:
    """The heartbeat files of a run directory, by rank."""
    return HEARTBEATS.found_in(run_dir)


def _records(lines: list[bytes]) -> Iterable[Mapping[str, Any] | None]:
    """The records of whole lines: all at once where that is safe, else line by line."""
    if all(line.startswith(b"{") and line.endswith(b"}") for line in lines):
        try:
            joined: list[Any] = json.loads(b"[" + _BETWEEN.join(lines) + b"]")
        except (ValueError, RecursionError):
            joined = []
        # Two damaged lines could complete each other; then the marks between them are missing.
        records = joined[::2]
        marks_hold = joined[1::2] == [_MARK] * (len(lines) - 1)
        if marks_hold and len(records) == len(lines) and all(type(r) is dict for r in records):
            return records
    return map(parse_heartbeat, lines)
