"""A launch while it runs: its ranks, their silence, their numbers, and what is shown of them.

Here: the view that follows all of them by their heartbeat files and their processes.
"""

from __future__ import annotations

import os
import select
import time
from pathlib import Path

from runbook.accounts.clocks import ARRIVAL_S
from runbook.folder.launch import LineTail, heartbeat_files, parse_heartbeat
from runbook.launch.watch.rank_state import RankState, Reading
from runbook.process import environment_holds, exit_code_of, has_ended_under, holds_file

# Heartbeat files that are looked at in a second, at most: ranks that are more than few are each
# looked at less often, few whenever somebody asks.
LOOKS_PER_S, FEW = 1000, 10
# Looks at a launch are a tenth of a second apart; a busy machine is late by less than this.
_LATE_S = 5.0


class Presence:
    """Told of every look at a launch, it knows of those between which nobody was there.

    A harness does not run while it is stopped (Ctrl-Z), or frozen with its container. Its monotonic
    clock goes on then, as those of the ranks do. While the machine is asleep that clock stands
    still for all of them: no time is missing, and none may be given back.

    Only this process's own clocks count, nothing that a trainer writes: time in which this process
    computed, as over long files, is not away. `away_s` is the sum, s.
    """

    def __init__(self) -> None:
        self.away_s = 0.0
        self._looked_at: tuple[float, float] | None = None

    def look(self) -> float:
        """Seconds away since the last look, beyond what is usual; 0 if somebody was there."""
        now = time.monotonic(), time.process_time()
        before, self._looked_at = self._looked_at or now, now
        clock_s, computed_s = (b - a for a, b in zip(before, now, strict=True))
        gap_s = clock_s - computed_s
        if gap_s <= _LATE_S:
            return 0.0
        self.away_s += gap_s
        return gap_s


class RankWatch:
    """Follows the heartbeat files of one launch; nothing here signals or judges."""

    def __init__(self, run_dir: Path, token: str, started_at: float) -> None:
        self.run_dir = run_dir
        self.token = token
        self.started_at = started_at
        self.ranks: dict[int, RankState] = {}
        self._tails: dict[int, LineTail] = {}
        self._look_at = 0.0
        self.presence = Presence()

    def close(self) -> None:
        """Let go of the processes' handles."""
        for state in self.ranks.values():
            if state.handle is not None:
                os.close(state.handle)
                state.handle = None

    def wait(self, within_s: float, *, child: int | None = None) -> None:
        """Sleep until the process of a rank, or the child, ends; then read, and note who ended.

        Where no process is held, since they are on other machines, it sleeps all that time.
        """
        poller = select.poll()
        for state in self.ranks.values():
            if state.handle is not None:
                poller.register(state.handle, select.POLLIN)
        own = os.pidfd_open(child) if child is not None else None
        try:
            if own is not None:
                poller.register(own, select.POLLIN)
            ready = {handle for handle, _ in poller.poll(within_s * 1000)}
        finally:
            if own is not None:
                os.close(own)
        away_s = self.presence.look()
        if ready or away_s or time.monotonic() >= self._look_at:
            # Heartbeats first: a rank that said its exit and then ended has not died.
            self.look(away_s)
            self._note_deaths(ready)

    def look(self, away_s: float) -> None:
        """Read what has been written, `away_s` after somebody was there to read it.

        How a rank fared meanwhile nobody saw, so its silence counts from now on. Where it had
        spoken before and goes on afterwards, that time is within its own.
        """
        known = list(self.ranks.values())
        within = {state.rank for state in known if state.mono is not None and not state.ended}
        for state in known:
            state.changed_at += away_s
            state.phase_since += away_s
        self.update()
        for state in known:
            if state.rank not in within or state.ended:
                state.away_s += away_s

    def update(self) -> None:
        """Read what has been written since the last call."""
        count = len(self.ranks)
        self._look_at = time.monotonic() + (count / LOOKS_PER_S if count > FEW else 0.0)
        for rank, path in heartbeat_files(self.run_dir).items():
            if rank not in self.ranks:
                self.ranks[rank] = RankState(
                    rank=rank,
                    path=path,
                    changed_at=self.started_at,
                    phase_since=self.started_at,
                    away_s=self.presence.away_s,
                )
                self._tails[rank] = LineTail(path)
        for rank, state in self.ranks.items():
            self._follow(state, self._tails[rank])

    def _follow(self, state: RankState, tail: LineTail) -> None:
        blocks, phase, anew = tail.blocks_read, state.phase, tail.anew
        trained = state.steps_ended > 0
        before = Reading.of(state.pid if state.on_this_machine else None)
        for line in tail.lines():
            record = parse_heartbeat(line)
            if record is None or (record.get("token") or "") != self.token:
                continue
            state.take(record)
            pid = record.get("pid")
            if isinstance(pid, int) and state.pid is None and pid != state.foreign_pid:
                self._adopt(state, pid)
        if tail.blocks_read > blocks:
            # The age of a heartbeat is measured from when its file grew, not from what it says: a
            # clock that jumps can then neither hide a stall nor make one up.
            now, since = Reading.of(state.pid if state.on_this_machine else None), state.looked
            # A harness that waits for a processor finds lines that have lain there for seconds.
            seen = since is not None and now.mono - since.mono <= ARRIVAL_S
            state.looked_at(before, now, trained=trained and tail.anew == anew)
            state.arrived(now.mono, punctual=seen)
            if state.phase != phase:
                state.phase_since = state.changed_at
        else:
            state.looked = before

    def _adopt(self, state: RankState, pid: int) -> None:
        try:
            handle = os.pidfd_open(pid)
        except OSError:
            state.pid, state.died_at = pid, time.monotonic()
            return
        if self._is_ours(state, pid, handle):
            state.pid, state.handle, state.on_this_machine = pid, handle, True
        else:
            # Never ours: its heartbeats count, its number is not used.
            os.close(handle)
            state.foreign_pid = pid

    def _is_ours(self, state: RankState, pid: int, handle: int) -> bool:
        alive = environment_holds(pid, self.token) or holds_file(pid, str(state.path))
        return alive or has_ended_under(pid, handle, self.token)

    def _note_deaths(self, readable: set[int]) -> None:
        for state in self.ranks.values():
            if state.handle in readable and state.handle is not None and state.pid is not None:
                state.parent_saw = exit_code_of(state.pid)
                os.close(state.handle)
                state.handle, state.died_at = None, time.monotonic()
