"""The live view of a launch: each rank's last sign of life, read from its heartbeat file."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nsa.contract import Event, Phase
from runbook.launch.endings import exit_code_of
from runbook.launch.reaper import environment_holds, holds_file
from runbook.read.heartbeats import heartbeat_files

_LONGEST_LINE = 1 << 20


@dataclass(kw_only=True)
class RankState:
    """What one rank said last. Times are on the harness's monotonic clock."""

    rank: int
    path: Path
    pid: int | None = None
    foreign_pid: int | None = None
    handle: int | None = None
    died_at: float | None = None
    parent_saw: int | None = None
    event: str = ""
    phase: str = "init"
    step: int = 0
    changed_at: float = 0.0
    spoke_mono: float | None = None
    exit_code: int | None = None
    exit_reason: str = ""
    steps_done: int | None = None
    toks_per_s: float | None = None
    longest_step_s: float = 0.0
    offset: int = 0
    pending: bytes = b""
    step_started_mono: float | None = None
    recent: list[Mapping[str, Any]] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        """The rank has said its exit, or its process is gone."""
        return self.exit_code is not None or self.died_at is not None


class RankWatch:
    """Follows the heartbeat files of one launch; nothing here signals or judges."""

    def __init__(self, run_dir: Path, token: str, started_at: float) -> None:
        self.run_dir = run_dir
        self.token = token
        self.started_at = started_at
        self.ranks: dict[int, RankState] = {}

    def close(self) -> None:
        """Let go of the processes' handles."""
        for state in self.ranks.values():
            if state.handle is not None:
                os.close(state.handle)
                state.handle = None

    def handles(self) -> list[int]:
        """Handles that become readable when a rank's process ends."""
        return [s.handle for s in self.ranks.values() if s.handle is not None]

    def update(self) -> None:
        """Read what has been written since the last call."""
        for rank, path in heartbeat_files(self.run_dir).items():
            if rank not in self.ranks:
                self.ranks[rank] = RankState(rank=rank, path=path, changed_at=self.started_at)
        for state in self.ranks.values():
            self._follow(state)

    def _follow(self, state: RankState) -> None:
        with state.path.open("rb") as stream:
            stream.seek(state.offset)
            data = stream.read()
        if not data:
            return
        state.offset += len(data)
        # The age of a heartbeat is measured from when its file grew, not from what it says: a
        # clock that jumps can then neither hide a stall nor make one up.
        state.changed_at = time.monotonic()
        *lines, state.pending = (state.pending + data).split(b"\n")
        state.pending = state.pending[:_LONGEST_LINE]
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and (record.get("token") or "") == self.token:
                self._take(state, record)

    def _take(self, state: RankState, record: Mapping[str, Any]) -> None:
        state.recent = [*state.recent[-9:], record]
        state.event = str(record.get("event", ""))
        state.phase = str(record.get("phase") or state.phase)
        step, pid, mono = record.get("step"), record.get("pid"), record.get("mono")
        if isinstance(step, int):
            state.step = step
        if isinstance(pid, int) and state.pid is None and pid != state.foreign_pid:
            self._adopt(state, pid)
        if isinstance(mono, int | float):
            state.spoke_mono = float(mono)  # exact, but only fit for comparing ranks
            self._time_steps(state, float(mono))
        if state.event == Event.PROGRESS and isinstance(record.get("toks_per_s"), int | float):
            state.toks_per_s = float(record["toks_per_s"])
        if state.event == Event.EXIT:
            code, done = record.get("code"), record.get("steps_done")
            state.exit_code = code if isinstance(code, int) else 1
            state.exit_reason = str(record.get("reason") or "")
            state.steps_done = done if isinstance(done, int) else None

    def _adopt(self, state: RankState, pid: int) -> None:
        try:
            handle = os.pidfd_open(pid)
        except OSError:
            state.pid, state.died_at = pid, time.monotonic()
            return
        if environment_holds(pid, self.token) or holds_file(pid, str(state.path)):
            state.pid, state.handle = pid, handle
        else:
            # Gone already, or never ours: its heartbeats count, its number is not used.
            os.close(handle)
            state.foreign_pid = pid

    def _time_steps(self, state: RankState, mono: float) -> None:
        if state.event == Event.STEP_START:
            state.step_started_mono = mono if state.phase != Phase.FIRST_STEP else None
        elif state.event == Event.STEP_END and state.step_started_mono is not None:
            state.longest_step_s = max(state.longest_step_s, mono - state.step_started_mono)
            state.step_started_mono = None

    def note_deaths(self, readable: set[int]) -> None:
        """Record which ranks' processes have ended, and how."""
        for state in self.ranks.values():
            if state.handle in readable and state.handle is not None and state.pid is not None:
                state.parent_saw = exit_code_of(state.pid, state.handle)
                os.close(state.handle)
                state.handle, state.died_at = None, time.monotonic()
