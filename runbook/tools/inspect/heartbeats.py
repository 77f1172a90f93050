"""Heartbeat files of any trainer: who wrote them, how far they go, and where they fall silent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runbook.tools.inspect.types import RankFacts, Remark, RemarkCode

# A rank is silent if it ends this many steps behind the others, or this long before them.
_STEPS_BEHIND = 1
_SECONDS_BEHIND = 60.0


@dataclass(kw_only=True)
class _Scan:
    """One pass over a file; memory does not grow with its length."""

    rank: int
    lines: int = 0
    torn: int = 0
    tokens: dict[str, None] = field(default_factory=dict)
    pids: dict[int, None] = field(default_factory=dict)
    ranks: dict[int, None] = field(default_factory=dict)
    first_step: int | None = None
    last_step: int | None = None
    steps_back: int = 0
    clocks: dict[str, float] = field(default_factory=dict)
    clock_back: int = 0
    silence_s: float | None = None
    last_event: str = ""
    last_pid: int | None = None
    exit_code: int | None = None

    def take(self, record: Mapping[str, Any]) -> None:
        """Fold one line in."""
        self.lines += 1
        token, rank = record.get("token"), record.get("rank")
        if isinstance(token, str):
            self.tokens[token] = None
        if isinstance(rank, int):
            self.ranks[rank] = None
        self._clock(record)
        self._step(record.get("step"))
        event = record.get("event", record.get("msg"))
        if isinstance(event, str):
            self.last_event = event
            if event == "exit" and isinstance(record.get("code"), int):
                self.exit_code = int(record["code"])

    def _clock(self, record: Mapping[str, Any]) -> None:
        pid = record.get("pid")
        same_process = pid == self.last_pid
        if isinstance(pid, int):
            self.pids[pid] = None
            self.last_pid = pid
        for name in ("mono", "ts"):
            now = record.get(name)
            if not isinstance(now, int | float):
                continue
            before = self.clocks.get(name)
            self.clocks[name] = float(now)
            if before is None or (name == "mono" and not same_process):
                continue
            self.clock_back += now < before
            if name == "ts":
                self.silence_s = max(self.silence_s or 0.0, float(now) - before)

    def _step(self, step: object) -> None:
        if not isinstance(step, int):
            return
        if self.last_step is not None and step < self.last_step:
            self.steps_back += 1
        if self.first_step is None:
            self.first_step = step
        self.last_step = step


def inspect_heartbeats(
    path: Path, *, rank: int, relative_to: Path
) -> tuple[RankFacts, list[Remark]]:
    """Read one heartbeat file, ours or foreign (`msg` for `event`, no token, no monotonic time).

    Raises OSError if the file cannot be read.
    """
    scan = _Scan(rank=rank)
    with path.open("rb") as stream:
        for line in stream:
            record = _object(line) if line.endswith(b"\n") else None
            if record is None:
                scan.torn += bool(line.strip())
            else:
                scan.take(record)
    name = path.relative_to(relative_to).as_posix()
    facts = RankFacts(
        rank=rank,
        path=name,
        lines=scan.lines,
        torn_lines=scan.torn,
        tokens=tuple(scan.tokens),
        pids=tuple(scan.pids),
        first_step=scan.first_step,
        last_step=scan.last_step,
        last_event=scan.last_event,
        exit_code=scan.exit_code,
        longest_silence_s=scan.silence_s,
        last_ts=scan.clocks.get("ts"),
    )
    return facts, [Remark(code=code, message=text, path=name) for code, text in _faults(scan)]


def _object(line: bytes) -> Mapping[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _faults(scan: _Scan) -> list[tuple[RemarkCode, str]]:
    faults = []
    if scan.torn:
        faults.append((RemarkCode.TORN_ROWS, f"{scan.torn} torn or unreadable heartbeat lines"))
    if len(scan.tokens) > 1:
        text = f"heartbeats of {len(scan.tokens)} runs in one file (run tokens differ)"
        faults.append((RemarkCode.OTHER_RUN, text))
    elif len(scan.pids) > 1:
        pids = ", ".join(map(str, scan.pids))
        text = f"heartbeats of {len(scan.pids)} processes in one file: {pids}"
        faults.append((RemarkCode.OTHER_RUN, text))
    if others := [rank for rank in scan.ranks if rank != scan.rank]:
        faults.append(
            (RemarkCode.OTHER_RUN, f"lines of rank {others} in the file of rank {scan.rank}")
        )
    if scan.steps_back:
        text = f"the step goes back at {scan.steps_back} places"
        faults.append((RemarkCode.STEPS_NOT_INCREASING, text))
    if scan.clock_back:
        faults.append((RemarkCode.CLOCK_BACK, f"the clock goes back at {scan.clock_back} places"))
    if scan.exit_code:
        faults.append((RemarkCode.FAILED_EXIT, f"the rank ended with exit code {scan.exit_code}"))
    return faults


def rank_remarks(
    ranks: tuple[RankFacts, ...], *, world_size: int | None, tokens: frozenset[str]
) -> list[Remark]:
    """What only the files together can tell: other runs, missing ranks, ranks that fell silent."""
    remarks = []
    present = {facts.rank for facts in ranks}
    expected = set(range(world_size)) if world_size else set(range(max(present, default=-1) + 1))
    if ranks and (lost := sorted(expected - present)):
        text = f"no heartbeats of rank {', '.join(map(str, lost))}"
        remarks.append(Remark(code=RemarkCode.MISSING_RANK, message=text, path="."))
    known = {name for facts in ranks for name in facts.tokens} | tokens
    if len(known) > 1 and all(len(facts.tokens) <= 1 for facts in ranks):
        text = f"files of {len(known)} runs in one directory: {', '.join(sorted(known))}"
        remarks.append(Remark(code=RemarkCode.OTHER_RUN, message=text, path="."))
    return [*remarks, *_silent(ranks)]


def _silent(ranks: tuple[RankFacts, ...]) -> list[Remark]:
    furthest = max((facts.last_step or 0 for facts in ranks), default=0)
    latest = max((facts.last_ts or 0.0 for facts in ranks), default=0.0)
    remarks = []
    for facts in ranks:
        behind = furthest - (facts.last_step or 0)
        early = latest - facts.last_ts if facts.last_ts is not None else 0.0
        if not facts.lines:
            text = "the file holds no heartbeat"
        elif behind > _STEPS_BEHIND:
            text = f"rank {facts.rank} ends at step {facts.last_step}, another at {furthest}"
        elif early > _SECONDS_BEHIND:
            text = f"rank {facts.rank} falls silent {early:.0f} s before another"
        else:
            continue
        remarks.append(Remark(code=RemarkCode.SILENT_RANK, message=text, path=facts.path))
    return remarks
