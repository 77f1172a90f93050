"""The ranks of a launch on several nodes, as each end of the shared files sees them.

An agent looks after the processes of its own node; the harness knows of processes only what the
agents tell. Heartbeats are read by both, since they lie in the run directory.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from runbook.folder.launch.lines import LineTail
from runbook.launch.nodes import files
from runbook.launch.watch import RankWatch
from runbook.launch.watch.rank_state import RankState
from runbook.process.ended import has_ended_under
from runbook.process.reaper import environment_holds


class OwnRanks(RankWatch):
    """On a node: finds the processes that its agent started by their heartbeats, and holds them.

    A rank whose process is not on this node is not followed any further: what it says is for the
    harness, and a file of each rank would be read on each node.
    """

    def __init__(self, run_dir: Path, token: str, started_at: float, *, node_token: str) -> None:
        super().__init__(run_dir, token, started_at)
        self._node_token = node_token

    def _follow(self, state: RankState, tail: LineTail) -> None:
        if state.foreign_pid is None:
            super()._follow(state, tail)

    def _adopt(self, state: RankState, pid: int) -> None:
        try:
            handle = os.pidfd_open(pid)
        except OSError:
            state.foreign_pid = pid
            return
        owner = self._node_token, files.NODE_TOKEN_VARIABLE
        if environment_holds(pid, *owner) or has_ended_under(pid, handle, *owner):
            state.pid, state.handle = pid, handle
        else:
            os.close(handle)
            state.foreign_pid = pid


class RanksOnNodes(RankWatch):
    """In the harness: processes are what the nodes' agents say of them."""

    def __init__(
        self, run_dir: Path, token: str, started_at: float, *, ranks_per_node: int
    ) -> None:
        super().__init__(run_dir, token, started_at)
        self._ranks_per_node = ranks_per_node
        self.nodes: dict[str, files.NodeState] = {}
        # When each node was heard last, on this process's monotonic clock.
        self.heard_at: dict[str, float] = {}
        self._said: dict[str, LineTail] = {}
        self._given: dict[int, str] = {}

    def wait(self, within_s: float, *, child: int | None = None) -> None:
        """As in `RankWatch`; nothing here can be waited for, so it sleeps."""
        del child
        time.sleep(within_s)
        away_s = self.presence.look()
        if away_s or self._is_due():
            self.look(away_s)

    def update(self) -> None:
        """Read what ranks and agents have written since the last call."""
        super().update()
        for folder in files.node_folders(self.run_dir):
            tail = self._said.setdefault(folder.name, LineTail(folder / files.NODE_JSONL))
            for line in tail.lines():
                said = files.parse_record(line, files.NodeState)
                if said is not None:
                    self.heard_at[said.node] = time.monotonic()
                    self.nodes[said.node] = said
        for said in self.nodes.values():
            self._take(said)
        self._give_to_its_node()

    def _take(self, said: files.NodeState) -> None:
        for rank, process in said.ranks.items():
            state = self.ranks.get(rank)
            if state is None:
                continue
            state.pid, state.told_state = process.pid, process.state
            state.told_gap_s = process.gap_s
            if process.gone and state.died_at is None:
                state.parent_saw, state.died_at = process.exit_code, time.monotonic()

    def _give_to_its_node(self) -> None:
        """A rank that ended before its agent could hold it is of the node whose command ended."""
        ended = [
            node
            for node in self.nodes.values()
            if node.code is not None and len(node.ranks) < self._ranks_per_node
        ]
        if len(ended) != 1:
            return
        for rank, state in self.ranks.items():
            if state.died_at is None and not self.node_of(rank) and state.foreign_pid is not None:
                state.died_at = time.monotonic()
                self._given[rank] = ended[0].node

    def node_of(self, rank: int) -> str:
        """The node that a rank runs on; empty while no node has told."""
        told = (name for name, node in self.nodes.items() if rank in node.ranks)
        return next(told, self._given.get(rank, ""))

    def _adopt(self, state: RankState, pid: int) -> None:
        """The number, and the time of day, mean something on its own node only."""
        state.foreign_pid, state.elsewhere = pid, True
