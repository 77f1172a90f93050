"""heartbeat_rank*.jsonl: what one rank said about itself, and how it ended."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nsa.contract import HEARTBEATS, Event
from runbook.records.evidence import Effect, RankLog

_BLOCK_BYTES = 2 << 20
_KEPT_PER_KIND = 4096
_MARK = -7_340_033
_BETWEEN = f",{_MARK},".encode()


def heartbeat_files(run_dir: Path) -> dict[int, Path]:
    """The heartbeat files of a run directory, by rank."""
    return HEARTBEATS.found_in(run_dir)


class _Collector:
    """Everything kept from the events of one rank; memory does not grow with ordinary steps."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.events = 0
        self.dropped = 0
        self.tokens: set[str] = set()
        self.counts: Counter[str] = Counter()
        self.other_ranks: set[int] = set()
        self.steps: tuple[int | None, int | None] = (None, None)
        self.last_mono: float | None = None
        self.clock_back = 0
        self.peaks: dict[str, float] = {}
        self.effects: list[Effect] = []
        self.kept: dict[str, list[Mapping[str, Any]]] = {}
        self.gates: dict[str, float] = {}

    def take(self, record: Mapping[str, Any]) -> None:
        """Fold one event in."""
        event = record.get("event")
        if not isinstance(event, str):
            self.dropped += 1
            return
        self.events += 1
        self.counts[event] += 1
        token = record.get("token")
        if token is not None:
            self.tokens.add(str(token))
        rank = record.get("rank")
        if rank != self.rank and isinstance(rank, int):
            self.other_ranks.add(rank)
        self._clock_and_memory(record)
        if event in (Event.STEP_START, Event.STEP_END, Event.PROGRESS):
            self._step(record)
            if event == Event.PROGRESS:
                self._gates(record)
        elif event == Event.EFFECT:
            self._effect(record)
        else:
            self._keep(event, record)

    def _clock_and_memory(self, record: Mapping[str, Any]) -> None:
        mono = record.get("mono")
        if isinstance(mono, float | int):
            if self.last_mono is not None and mono < self.last_mono:
                self.clock_back += 1
            self.last_mono = mono
        for name in ("rss_mib", "cuda_mib"):
            value = record.get(name)
            if isinstance(value, float | int) and value > self.peaks.get(name, -1.0):
                self.peaks[name] = float(value)

    def _step(self, record: Mapping[str, Any]) -> None:
        step = record.get("step")
        if not isinstance(step, int):
            return
        first, last = self.steps
        self.steps = (
            step if first is None or step < first else first,
            step if last is None or step > last else last,
        )

    def _gates(self, record: Mapping[str, Any]) -> None:
        for name in ("gate_entropy", "max_gate"):
            value = record.get(name)
            if isinstance(value, float | int):
                self.gates[name] = float(value)

    def _effect(self, record: Mapping[str, Any]) -> None:
        if len(self.effects) >= _KEPT_PER_KIND:
            return
        took = record.get("took_effect")
        block = record.get("block")
        self.effects.append(
            Effect(
                toggle=str(record.get("toggle", "")),
                value=str(record.get("value", "")),
                took_effect=took if isinstance(took, bool) else None,
                evidence=record.get("evidence"),
                arm=str(record.get("arm") or ""),
                block=block if isinstance(block, int) else 0,
                rank=self.rank,
            )
        )

    def _keep(self, event: str, record: Mapping[str, Any]) -> None:
        kept = self.kept.setdefault(event, [])
        if len(kept) < _KEPT_PER_KIND:
            kept.append(record)
        else:
            kept[-1] = record  # the last one is the one that says how it ended

    def last(self, event: str) -> Mapping[str, Any]:
        """The last record of an event, or an empty one."""
        kept = self.kept.get(event)
        return kept[-1] if kept else {}

    def problems(self) -> list[str]:
        """What does not fit one healthy rank of one launch."""
        found = []
        if self.dropped:
            found.append(f"{self.dropped} unreadable lines were dropped")
        if len(self.tokens) > 1:
            found.append(f"heartbeats of {len(self.tokens)} launches in one file")
        if self.other_ranks:
            found.append(f"heartbeats of other ranks in the file: {sorted(self.other_ranks)}")
        if self.clock_back:
            found.append(f"the monotonic clock goes back at {self.clock_back} places")
        return found


def read_heartbeats(path: Path, *, rank: int, relative_to: Path) -> RankLog:
    """Read one rank's heartbeats; never raises for what the file holds.

    A torn last line is dropped and counted, and is no damage; an unreadable line before it,
    another launch's token, another rank's number or a clock that goes back is.
    Raises `OSError` if the file cannot be read at all.
    """
    collector = _Collector(rank)
    sha256, torn = _collect(path, collector)
    name = path.relative_to(relative_to) if path.is_relative_to(relative_to) else path
    problems = collector.problems()
    damaged = bool(problems)
    if torn:
        problems.append(f"a torn last line was dropped ({torn} bytes)")
    ended = collector.last(Event.EXIT)
    return RankLog(
        rank=rank,
        path=name.as_posix(),
        sha256=sha256,
        events=collector.events,
        tokens=frozenset(collector.tokens),
        first_step=collector.steps[0],
        last_step=collector.steps[1],
        exit_code=_whole(ended.get("code")),
        exit_reason=str(ended.get("reason") or ""),
        param_hash=str(ended["param_hash"]) if ended.get("param_hash") else None,
        peak_rss_mib=collector.peaks.get("rss_mib"),
        peak_cuda_mib=collector.peaks.get("cuda_mib"),
        counts=dict(collector.counts),
        effects=tuple(collector.effects),
        ddp_buckets=tuple(collector.kept.get(Event.DDP_BUCKETS, ())),
        arm_failures=tuple(collector.kept.get(Event.ARM_FAILED, ())),
        nonfinite=collector.last(Event.NONFINITE) or None,
        halt_reason=_halt_reason(collector),
        gate_entropy_last=collector.gates.get("gate_entropy"),
        max_gate_last=collector.gates.get("max_gate"),
        dropped_lines=collector.dropped + bool(torn),
        problems=tuple(problems),
        damaged=damaged,
    )


def _collect(path: Path, collector: _Collector) -> tuple[str, int]:
    """Fold the whole file in; its digest, and the length of a torn last line."""
    digest = hashlib.sha256()
    tail = b""
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            digest.update(block)
            block = tail + block
            cut = block.rfind(b"\n") + 1
            tail = block[cut:]
            for record in _records(block[:cut], collector):
                collector.take(record)
    return digest.hexdigest(), len(tail)


def _halt_reason(collector: _Collector) -> str | None:
    return (
        str(collector.last(Event.HALT).get("reason", "")) if collector.counts[Event.HALT] else None
    )


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _records(block: bytes, collector: _Collector) -> Iterable[Mapping[str, Any]]:
    """The records of whole lines: all at once where that is safe, else line by line."""
    lines = [line for line in block.split(b"\n")[:-1] if line]
    if not lines:
        return []
    if all(line.startswith(b"{") and line.endswith(b"}") for line in lines):
        try:
            joined: list[Any] = json.loads(b"[" + _BETWEEN.join(lines) + b"]")
        except (ValueError, RecursionError):
            joined = []
        # Two damaged lines could mend each other; then the marks between lines are not in place.
        records = joined[::2]
        marks_hold = joined[1::2] == [_MARK] * (len(lines) - 1)
        if marks_hold and len(records) == len(lines) and all(type(r) is dict for r in records):
            return records
    return _one_by_one(lines, collector)


def _one_by_one(lines: Iterable[bytes], collector: _Collector) -> Iterable[Mapping[str, Any]]:
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict):
            yield record
        else:
            collector.dropped += 1
