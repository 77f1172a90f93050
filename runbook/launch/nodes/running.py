"""A launch as a job of a cluster: watched through its files, and through what the cluster says."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from runbook.folder.launch import LineTail
from runbook.launch.command import RefusedError
from runbook.launch.end import Aftermath
from runbook.launch.launcher_api import Start
from runbook.launch.nodes import files
from runbook.launch.watch import RankWatch
from runbook.launch.watch.rank_state import RankState
from runbook.records.launch import End, LaunchStatus

if TYPE_CHECKING:
    from runbook.launch.nodes import NodesLauncher

# How often the cluster is asked; the files are looked at ten times a second.
_ASK_EVERY_S = 1.0
# An agent tells once a second, and a shared folder may show it later: so long is quiet, and so long
# is lost even where nobody waits for a rank of it.
_LATE_S, _QUIET_S = 1.6, 4.0
NODE_SILENT_S = 15.0
# From the job's start until the first word of each agent, which has to import its modules first.
_NODE_STARTS_S = 90.0
_OVER_GRACE_S = 1.5
# A wait in the queue that is shorter than this is told to nobody.
_WORTH_A_WORD_S = 5.0
_STOP_GRACE_S = 3.0
_CANCEL_GRACE_S = 10.0


class RanksOnNodes(RankWatch):
    """In the harness: processes are what the nodes' agents say of them."""

    def __init__(self, run_dir: Path, job: files.Job, started_at: float) -> None:
        super().__init__(run_dir, job.run_token, started_at)
        self._ranks_per_node = max(1, job.nproc // job.nodes)
        self.nodes: dict[str, files.NodeState] = {}
        # When each node was heard last, on this process's monotonic clock.
        self.heard_at: dict[str, float] = {}
        self._said: dict[str, LineTail] = {}
        self._given: dict[int, str] = {}

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


class NodesRun:
    """A job that was submitted, by this process or by one that was killed since."""

    def __init__(self, launcher: NodesLauncher, start: Start, job: files.Job) -> None:
        self._launcher, self._start, self.job = launcher, start, job
        self._cluster = launcher.cluster
        self._names: tuple[str, ...] = ()
        self.submitted = time.monotonic()
        self.began: float | None = None
        self.watch = RanksOnNodes(start.run_dir, job, self.submitted)
        self.state = self._cluster.pending
        self._asked_at, self._over_at, self._terminated_at = 0.0, 0.0, 0.0
        self._told, self._gone, self._lost = "", False, False

    def wait(self, within_s: float) -> None:
        """As in `Running`."""
        self.watch.wait(within_s)
        if time.monotonic() > self._asked_at + _ASK_EVERY_S:
            self._ask()

    def _ask(self) -> None:
        """Look at the job; a cluster that does not answer leaves it as it was."""
        self._asked_at = time.monotonic()
        try:
            state = self._cluster.look(self.job)
        except RefusedError as error:
            self._tell(str(error))
            return
        self._gone = state is None
        self.state = state or self.state
        if self.state.waits:
            if self._asked_at - self.submitted > _WORTH_A_WORD_S:
                self._tell(f"waits in the queue: {self.state.why}")
        elif self.began is None and (self.watch.nodes or not self._is_over()):
            self.began = self._asked_at
            self._names = self.state.names()
            # A job of more nodes adds the others.
            files.keep_nodes(self._launcher.kept, self._names)
            if self._told:
                self._tell(f"runs on {', '.join(self._names)}")

    def _tell(self, text: str) -> None:
        if text != self._told:
            self._told = text
            self._launcher.note(f"{self._start.launch.name}: {self.job.called} {text}")

    def _is_over(self) -> bool:
        return self._gone or self.state.over

    def poll(self) -> int | None:
        """The exit code once the command has ended on each node, or was killed on one."""
        codes = [node.code for node in self.watch.nodes.values() if node.code is not None]
        if self._by_cluster(codes):
            return None  # it did not end by itself
        killed = [code for code in codes if code < 0]
        if killed:
            return killed[0]
        if len(codes) < self.job.nodes:
            return None
        return next((code for code in codes if code), 0)

    def _by_cluster(self, codes: list[int]) -> bool:
        """Is the cluster ending the job? SIGTERM may come to agents and their commands at once."""
        if any(node.stopped_by for node in self.watch.nodes.values()):
            return True
        if -signal.SIGTERM not in codes:
            return False
        self._terminated_at = self._terminated_at or time.monotonic()
        return time.monotonic() < self._terminated_at + _OVER_GRACE_S

    def trouble(self, *, suspected: bool = False) -> End | None:
        """A job that does not start, was ended by its cluster or somebody else, or lost a node."""
        if suspected:
            self._look_closely()
        now = time.monotonic()
        if self.state.waits and not self._gone:
            waited_s, most_s = now - self.submitted, self._launcher.queue_s
            if waited_s <= most_s:
                return None
            cause = (
                f"{self.job.called} never started: {waited_s:.0f} s in the queue, the limit is "
                f"{most_s:g} s (--queue-s); {self.state.why}"
            )
            return End(status=LaunchStatus.ENVIRONMENT_ERROR, cause=cause)
        if self._is_over():
            self._over_at = self._over_at or now
            told = suspected or now > self._over_at + _OVER_GRACE_S
            return self._ended_early() if told else None
        if any(node.stopped_by for node in self.watch.nodes.values()):
            self._asked_at = 0.0  # the cluster knows why
        return self._lost_node(now, _QUIET_S if suspected else NODE_SILENT_S)

    def _look_closely(self) -> None:
        """Before a rank is blamed: is the job over, or one of its nodes quiet and maybe lost?"""
        deadline = time.monotonic() + _QUIET_S
        self._ask()
        while time.monotonic() < deadline and not self._is_over():
            now = time.monotonic()
            late = [now - at for at in self.watch.heard_at.values() if now - at > _LATE_S]
            ending = any(node.stopped_by for node in self.watch.nodes.values())
            if not ending and not any(silent < _QUIET_S for silent in late):
                return
            self.wait(0.1)

    def _lost_node(self, now: float, silent_s: float) -> End | None:
        if self.began is None:
            return None
        for name, heard in self.watch.heard_at.items():
            if now - heard > silent_s and not self._has_ended(name):
                return self._lost_one(name, now - heard)
        if len(self.watch.nodes) < self.job.nodes and now - self.began > _NODE_STARTS_S:
            for name in self._names:
                if name not in self.watch.nodes:
                    return self._lost_one(name, now - self.began)
        return None

    def _lost_one(self, name: str, silent_s: float) -> End:
        self._lost = True
        cause = (
            f"node {name} is lost: nothing heard from it for {silent_s:.0f} s; "
            f"{self._cluster.title} calls it {self._cluster.calls(name)}"
        )
        return End(status=LaunchStatus.HARDWARE_ERROR, cause=cause, node=name)

    def _has_ended(self, name: str) -> bool:
        return name in self.watch.nodes and self.watch.nodes[name].end is not None

    def _ended_early(self) -> End:
        told = [node for node in self.watch.nodes.values() if node.code is not None]
        silent = f"{self.job.nodes - len(told)} of its {self.job.nodes} nodes"
        return self.state.ended(self.job, self._start.run_dir, gone=self._gone, silent=silent)

    def where(self, rank: int) -> str:
        """As in `Running`."""
        return self.watch.node_of(rank)

    def send(self, state: RankState, number: int) -> bool:
        """As in `Running`: the agent of its node sends it within a tenth of a second."""
        node = self.watch.node_of(state.rank)
        if not node or state.died_at is not None or self._is_over():
            return False
        if self._has_ended(node) or time.monotonic() - self.watch.heard_at[node] > _QUIET_S:
            return False
        self._ask_node(node, files.Ask(rank=state.rank, signal=number))
        return True

    def _ask_node(self, node: str, ask: files.Ask) -> None:
        files.append_record(self._start.run_dir / files.NODES / node / files.ASKS_JSONL, ask)

    def stop(self) -> None:
        """Ask the agents to end everything, then end the job; the cluster has the last word."""
        # A full disk takes no line; the job is ended all the same.
        with suppress(OSError):
            for node in self.watch.nodes:
                self._ask_node(node, files.Ask(rank=0, signal=files.END_ALL))
        if self.began is not None and not self._is_over():
            self._until(self._all_have_ended, _STOP_GRACE_S)
        by_itself_s = 0.0 if self.began is None or self._lost else self._cluster.by_itself_s
        if not self._until(self._is_done, by_itself_s):
            self._cluster.cancel(self.job, at_once=False)
            # Of a lost node nobody says that it is done, until the cluster gives it up.
            grace_s = 1.0 if self._lost else _CANCEL_GRACE_S
            if not self._until(self._is_done, grace_s):
                self._cluster.cancel(self.job, at_once=True)
                if not self._until(self._is_done, grace_s):
                    self._tell(f"is not over: {self._cluster.title} ends it when its nodes answer")
        self.watch.update()
        self.watch.close()

    def _all_have_ended(self) -> bool:
        self.watch.update()
        now = time.monotonic()
        return all(
            node.end is not None or now - self.watch.heard_at[name] > _QUIET_S
            for name, node in self.watch.nodes.items()
        )

    def _is_done(self) -> bool:
        return not self._cluster.is_listed(self.job)

    def _until(self, done: Callable[[], bool], within_s: float) -> bool:
        deadline = time.monotonic() + within_s
        while not done():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    def aftermath(self, *, hurry: bool) -> Aftermath:
        """As in `Running`: the nodes' documents become those of the launch."""
        del hurry  # the agents knew
        run_dir = self._start.run_dir
        known = [node.end for node in self.watch.nodes.values() if node.end is not None]
        kernel, load = files.gather(run_dir)
        counts = [end.oom for end in known]
        return Aftermath(
            exit_code=self.poll(),
            oom=(_sum([before for before, _ in counts]), _sum([after for _, after in counts])),
            kernel=kernel,
            slots=tuple(dict.fromkeys(slot for end in known for slot in end.slots)),
            load=load,
            node=next((n.node for n in self.watch.nodes.values() if n.code and n.code < 0), ""),
        )


def _sum(counts: list[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known and len(known) == len(counts) else None
