"""heartbeat_rank*.jsonl: what one rank said about itself, and how it ended.

`RankFold` is the one fold over heartbeat records: a run that is watched, a run that is judged and
a directory of unknown origin are all read by it. `RankHistory` keeps besides what a judge needs.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsa.contract import HEARTBEATS, Event, ExitCode, Phase
from runbook.read.documents import name_below
from runbook.read.shapes import EVENTS, is_any_number, is_count, is_number, shaped
from runbook.records.evidence import Effect, RankLog

if TYPE_CHECKING:
    import pandas as pd

_BLOCK_BYTES = 2 << 20
_KEPT_PER_KIND = 4096
_MARK = -7_340_033
_BETWEEN = f",{_MARK},".encode()
_KNOWN = frozenset(Event)
_STEPPING = frozenset({Event.STEP_START, Event.STEP_END, Event.PROGRESS})
# What a step is made of: any other event between two steps' ends is time of its own.
_IN_A_STEP = frozenset({*_STEPPING, Event.FETCHED})
_STEP_COLUMNS = ("step", "mono", "alone", "embedded", "data", "mem_mib")
_DIGEST = re.compile(r"[0-9a-fA-F]{1,16}")
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
    _writer: object = None

    def take(self, record: Mapping[str, Any]) -> None:
        """Fold one record in; memory does not grow with the number of records."""
        event = record.get("event", record.get("msg"))
        if isinstance(event, str):
            self.events += 1
            self.event = event
        else:
            self.unnamed += 1
            self.event = ""
        self.phase = str(record.get("phase") or self.phase)
        token, rank = record.get("token"), record.get("rank")
        if token is not None:
            self.tokens[str(token)] = None
        named = whole_number(rank)
        if named is not None and named != self.rank:
            self.other_ranks.add(named)
        self._take_clocks(record)
        self._take_step(record.get("step"))
        if self.event == Event.EXIT:
            code = whole_number(record.get("code"))
            # An exit that cannot say its code is no good exit.
            self.exit_code = ExitCode.CRASH if code is None else code
            self.exit_reason = str(record.get("reason") or "")
            self.steps_done = whole_number(record.get("steps_done"))

    def _take_clocks(self, record: Mapping[str, Any]) -> None:
        writer: Any = record.get("pid")
        mono: Any = record.get("mono")
        now: Any = record.get("ts")
        if (pid := whole_number(writer)) is not None:
            self.pids[pid] = None
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

    def _take_step(self, value: object) -> None:
        step = whole_number(value)
        if step is None or not 0 <= step <= _MOST_STEPS:
            return
        self.steps_back += step < self.step
        self.step = step
        if self.event in _STEPPING or self.event not in _KNOWN:
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


@dataclass(kw_only=True)
class RankHistory(RankFold):
    """A fold that keeps the evidence as well: effects, peaks, and the records of rare events."""

    counts: Counter[str] = field(default_factory=Counter)
    peaks: dict[str, float] = field(default_factory=dict)
    effects: list[Effect] = field(default_factory=list)
    kept: dict[str, list[Mapping[str, Any]]] = field(default_factory=dict)
    ended: list[tuple[Any, ...]] = field(default_factory=list)
    progress: list[tuple[Any, ...]] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    _alone: bool = False

    def take(self, record: Mapping[str, Any]) -> None:
        """Fold one record in, and keep it if it is a rare one."""
        super().take(record)
        if not self.event:
            return
        self.counts[self.event] += 1
        self._take_account(record)
        for name in ("rss_mib", "cuda_mib"):
            value = self._number(record, name)
            if value is not None and value > self.peaks.get(name, -1.0):
                self.peaks[name] = value
        if self.event == Event.EFFECT:
            self._keep_effect(record)
        elif self.event not in _STEPPING:
            self._keep(self._in_shape(record))

    def _take_account(self, record: Mapping[str, Any]) -> None:
        """What this step says, to be held against the CSV's row of it."""
        if self.event == Event.STEP_END:
            embedded, memory = (self._number(record, name) for name in ("embedded", "mem_mib"))
            when = self._number(record, "mono")
            digest = self._digest(record)
            self.ended.append((self.step, when, self._alone, embedded, digest, memory))
            self._alone = True
        elif self.event == Event.PROGRESS:
            said = (self._number(record, name) for name in ("loss", "toks_per_s"))
            self.progress.append((self.step, *said))
        elif self.event not in _IN_A_STEP:
            self._alone = False

    def _number(self, record: Mapping[str, Any], name: str) -> float | None:
        """A field as a number, NaN included; a null is nothing, anything else is remembered."""
        value = record.get(name)
        if value is None:
            return None
        if is_any_number(value):
            return float(value)
        self._misshapen(f"{self.event}.{name} has an unexpected value: {str(value)[:40]!r}")
        return None

    def _digest(self, record: Mapping[str, Any]) -> str | None:
        value = record.get("data")
        if value is None or (isinstance(value, str) and _DIGEST.fullmatch(value)):
            return value
        self._misshapen(f"{self.event}.data is no digest: {str(value)[:40]!r}")
        return None

    def _in_shape(self, record: Mapping[str, Any]) -> Mapping[str, Any]:
        if (shape := EVENTS.get(self.event)) is None:
            return record
        fitted, problems = shaped(record, shape, self.event)
        for problem in problems:
            self._misshapen(problem)
        return fitted

    def _misshapen(self, what: str) -> None:
        if len(self.misshapen) < _KEPT_PER_KIND:
            self.misshapen.append(f"step {self.step}: {what}")

    def steps_frame(self) -> pd.DataFrame | None:
        """The columns of `RankLog.steps`, or None where no step ended."""
        import pandas as pd

        if not self.ended:
            return None
        ended = pd.DataFrame(self.ended, columns=_STEP_COLUMNS)
        said = pd.DataFrame(self.progress, columns=("step", "loss", "toks_per_s"))
        for name in ("mono", "embedded", "mem_mib"):
            ended[name] = ended[name].astype(float)
        for name in ("loss", "toks_per_s"):
            said[name] = said[name].astype(float)
        return ended.merge(said.drop_duplicates("step"), on="step", how="left")

    def _keep_effect(self, record: Mapping[str, Any]) -> None:
        if len(self.effects) >= _KEPT_PER_KIND:
            return
        took = record.get("took_effect")
        self.effects.append(
            Effect(
                toggle=str(record.get("toggle", "")),
                value=str(record.get("value", "")),
                took_effect=took if isinstance(took, bool) else None,
                evidence=record.get("evidence"),
                arm=str(record.get("arm") or ""),
                block=whole_number(record.get("block")) or 0,
                rank=self.rank,
            )
        )

    def _keep(self, record: Mapping[str, Any]) -> None:
        kept = self.kept.setdefault(self.event, [])
        if len(kept) < _KEPT_PER_KIND:
            kept.append(record)
        else:
            kept[-1] = record  # the last one is the one that says how it ended

    def last(self, event: str) -> Mapping[str, Any]:
        """The last record of an event, or an empty one."""
        return self.kept.get(event, [{}])[-1]


def read_heartbeats(path: Path, *, rank: int, relative_to: Path) -> RankLog:
    """Read one rank's heartbeats; never raises for what the file holds.

    A torn last line is dropped and counted, and is no damage; an unreadable line before it,
    another launch's token, another process or rank, or a clock that goes back is.
    Raises `OSError` if the file cannot be read at all.
    """
    history = RankHistory(rank=rank)
    sha256, torn = fold_file(path, history)
    return rank_log(history, sha256=sha256, torn=torn, path=name_below(path, relative_to))


def rank_log(history: RankHistory, *, sha256: str, torn: int, path: str) -> RankLog:
    """What a folded heartbeat file is evidence of; `torn` bytes of it are half a line."""
    problems = history.strangers()
    if dropped := history.dropped + history.unnamed:
        problems.append(f"{dropped} unreadable lines were dropped")
    if history.clock_back:
        problems.append(f"the monotonic clock goes back at {history.clock_back} places")
    if history.misshapen:
        more = f" and {len(history.misshapen) - 1} more" if len(history.misshapen) > 1 else ""
        problems.append(f"{history.misshapen[0]}{more}")
    damaged = bool(problems)
    if torn:
        problems.append(f"a torn last line was dropped ({torn} bytes)")
    param_hash = history.last(Event.EXIT).get("param_hash")
    halted = history.counts[Event.HALT]
    return RankLog(
        rank=history.rank,
        path=path,
        sha256=sha256,
        events=history.events,
        tokens=frozenset(history.tokens),
        first_step=history.first_step,
        last_step=history.last_step,
        exit_code=history.exit_code,
        exit_reason=history.exit_reason,
        param_hash=str(param_hash) if param_hash else None,
        peak_rss_mib=history.peaks.get("rss_mib"),
        peak_cuda_mib=history.peaks.get("cuda_mib"),
        counts=dict(history.counts),
        effects=tuple(history.effects),
        ddp_buckets=tuple(history.kept.get(Event.DDP_BUCKETS, ())),
        arm_failures=tuple(history.kept.get(Event.ARM_FAILED, ())),
        nonfinite=history.last(Event.NONFINITE) or None,
        halt_reason=str(history.last(Event.HALT).get("reason", "")) if halted else None,
        pids=tuple(history.pids),
        clock_s=history.clock_s,
        proof=history.last(Event.PROOF) or None,
        ending=history.last(Event.EXIT),
        steps=history.steps_frame(),
        dropped_lines=dropped + bool(torn),
        problems=tuple(problems),
        damaged=damaged,
    )


def fold_file(path: Path, fold: RankFold) -> tuple[str, int]:
    """Fold a whole file in; its digest, and the length of a torn last line."""
    digest = hashlib.sha256()
    tail = b""
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            digest.update(block)
            block = tail + block
            cut = block.rfind(b"\n") + 1
            tail = block[cut:]
            lines = [line for line in block[:cut].split(b"\n") if line.strip()]
            for record in _records(lines):
                if record is None:
                    fold.dropped += 1
                else:
                    fold.take(record)
    return digest.hexdigest(), len(tail)


def heartbeats_in(path: Path) -> Iterator[Mapping[str, Any]]:
    """The readable records of a file, one by one. Raises `OSError`."""
    with path.open("rb") as stream:
        for line in stream:
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
