"""Runs on each node of a job: `python -m runbook.launch.nodes.agent PLACE RUN_DIR`.

PLACE names the function of a launcher that tells where it runs, as `module:function`. It starts
torchrun, tells the harness through files how the ranks of its node are, passes its signals on, and
ends everything with its node's token when it is asked to, or dies itself.
"""

from __future__ import annotations

import errno
import os
import pkgutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from runbook.errors import RunbookError
from runbook.files import make_private_dir
from runbook.folder.launch import LineTail
from runbook.launch.command import as_typed, free_port, on_loopback, rendezvous
from runbook.launch.launcher_api import NODE_FOLDER_VARIABLE
from runbook.launch.local import Host
from runbook.launch.nodes import files
from runbook.launch.watch import RankWatch
from runbook.launch.watch.rank_state import RankState
from runbook.process import environment_holds, has_ended_under, signal_owned
from runbook.records.launch import TORCHRUN

_POLL_S = 0.1
_TELL_EVERY_S = 1.0
# How long torchrun's agents wait for each other if nobody says so.
_JOIN_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Place:
    """The node that an agent runs on, by the cluster's name and number.

    The other nodes reach it by its address. Variables that begin with one of `own` are the
    cluster's, not the launch's. An agent that the cluster ends waits `lingers_s` until the harness
    has looked why, before it is gone.
    """

    node: str
    index: int
    address: str
    own: tuple[str, ...] = ()
    lingers_s: float = 0.0


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
        super()._adopt(state, pid)
        if state.handle is None:
            state.pid, state.died_at, state.foreign_pid = None, None, pid

    def _is_ours(self, state: RankState, pid: int, handle: int) -> bool:  # noqa: ARG002
        owner = self._node_token, files.NODE_TOKEN_VARIABLE
        return environment_holds(pid, *owner) or has_ended_under(pid, handle, *owner)


class Agent:
    """The agent of one node. `run()` is called once."""

    def __init__(self, run_dir: Path, job: files.Job, place: Place) -> None:
        self.run_dir, self.job, self.place = run_dir, job, place
        node = place.node
        self.folder = run_dir / files.NODES / node
        self.token = f"{job.run_token}.{node}"
        self.state = files.NodeState(node=node, index=place.index)
        self.watch = OwnRanks(run_dir, job.run_token, time.monotonic(), node_token=self.token)
        self.stopped_by = ""
        self._told_at, self._parent = 0.0, os.getppid()
        self._asks, self._asked_to_end = LineTail(self.folder / files.ASKS_JSONL), False

    def run(self) -> None:
        """Start, look after and end the command. Raises OSError, RunbookError."""
        make_private_dir(self.folder)
        (self.folder / files.ASKS_JSONL).touch(mode=0o600)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCONT):
            signal.signal(number, self._note)
        self._tell()
        environment, argv = self._environment(), self._argv()
        host = Host(self.folder, environment, token=self.token, variable=files.NODE_TOKEN_VARIABLE)
        host.start(argv, cwd=Path(self.job.folder) if self.job.folder else None)
        try:
            code = self._look_after(host)
        finally:
            # What is killed from here on is nobody's fault, so it is not told as an end.
            self.watch.close()
            host.stop()
            self.watch.update()
        self._tell(code=code)
        after = host.aftermath(hurry=self._must_stop())
        self._tell(code=code, end=files.NodeEnd(oom=after.oom, slots=after.slots))
        deadline = time.monotonic() + self.place.lingers_s
        while self.stopped_by and not self._asked_to_end and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            self._answer()

    def _look_after(self, host: Host) -> int | None:
        """The command's own end; None where it has to be ended."""
        while host.child.poll() is None and not self._must_stop():
            self.watch.wait(_POLL_S, child=host.child.pid)
            self._answer()
            self._tell_in_time()
        if host.child.returncode is not None:
            self.watch.wait(0.0)  # its ranks ended before it
            self._tell(code=host.child.returncode)
        return host.child.returncode

    def _must_stop(self) -> bool:
        """Asked to by the harness, by the cluster, or alone because what started it is gone."""
        if os.getppid() != self._parent:
            self.stopped_by = self.stopped_by or "the end of its parent"
        return self._asked_to_end or bool(self.stopped_by)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if number != signal.SIGCONT:
            self.stopped_by = self.stopped_by or signal.Signals(number).name

    def _ranks(self) -> dict[int, files.RankOnNode]:
        return {
            rank: files.RankOnNode(
                pid=state.pid,
                state="" if state.died_at is not None else state.process_state,
                gone=state.died_at is not None,
                exit_code=state.parent_saw,
                gap_s=state.gap_s,
            )
            for rank, state in sorted(self.watch.ranks.items())
            if state.pid is not None
        }

    def _tell_in_time(self) -> None:
        if time.monotonic() > self._told_at + _TELL_EVERY_S or self._has_news():
            self._tell()

    def _has_news(self) -> bool:
        return {r: p.gone for r, p in self._ranks().items()} != {
            r: p.gone for r, p in self.state.ranks.items()
        }

    def _tell(self, *, code: int | None = None, end: files.NodeEnd | None = None) -> None:
        now = {"code": code, "stopped_by": self.stopped_by, "ranks": self._ranks(), "end": end}
        self.state = self.state.model_copy(update=now)
        files.append_record(self.folder / files.NODE_JSONL, self.state)
        self._told_at = time.monotonic()

    def _answer(self) -> None:
        """Do what the harness asks for, each once, in their order."""
        for line in self._asks.lines():
            ask = files.parse_record(line, files.Ask)
            if ask is None or ask.signal == files.END_ALL:
                self._asked_to_end = self._asked_to_end or ask is not None
                continue
            state = self.watch.ranks.get(ask.rank)
            if state is not None and state.pid is not None and state.died_at is None:
                signal_owned(state.pid, self.token, ask.signal, files.NODE_TOKEN_VARIABLE)

    def _environment(self) -> dict[str, str]:
        """What the harness gave the job, and where gloo and NCCL connect."""
        found = {k: v for k, v in os.environ.items() if not k.startswith(self.place.own)}
        found[files.NODE_TOKEN_VARIABLE] = self.token
        found[NODE_FOLDER_VARIABLE] = str(self.folder)
        if self.job.nodes > 1 and (interface := _interface_of(self.place.address)):
            for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                found.setdefault(name, interface)
        elif self.job.nodes == 1:
            found.setdefault("GLOO_SOCKET_IFNAME", "lo")
        path = [one for one in found.get("PYTHONPATH", "").split(os.pathsep) if one]
        if self.job.folder and self.job.folder not in path:
            found["PYTHONPATH"] = os.pathsep.join([self.job.folder, *path])
        return found

    def _argv(self) -> list[str]:
        first, *rest = self.job.argv
        if first != TORCHRUN:
            return [first, *rest]
        if self.job.nodes == 1:
            return on_loopback(rest, free_port())
        words = rendezvous(self._meet(), self.job.run_token)
        host, join_s = self.place.index == 0, max(_JOIN_S, self.job.meet_s)
        own = [f"--rdzv-conf=is_host={int(host)},join_timeout={join_s:.0f}"]
        return as_typed([*words, *own, f"--local-addr={self.place.address}", *rest])

    def _meet(self) -> str:
        """Where torchrun's agents meet: the first node says it, the others read it."""
        path, place = self.run_dir / files.RENDEZVOUS_JSON, self.place
        if place.index == 0:
            port = free_port(place.address)
            files.write_record(path, files.Rendezvous(address=place.address, port=port))
            return f"{place.address}:{port}"
        deadline = time.monotonic() + self.job.meet_s
        while time.monotonic() < deadline and not self._must_stop():
            if found := files.read_record(path, files.Rendezvous):
                return f"{found.address}:{found.port}"
            time.sleep(_POLL_S)
            self._answer()
            self._tell_in_time()
        raise RunbookError(f"the first node was not to be found by {path}")


def _interface_of(address: str) -> str:
    """The network interface that has the address; empty if none has."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return name
    return ""


def command(place: Callable[[], Place], run_dir: Path) -> list[str]:
    """What starts the agent on a node, whose `place` tells it where that is."""
    named = f"{place.__module__}:{place.__qualname__}"
    return [sys.executable, "-P", "-m", __name__, named, str(run_dir.resolve())]


def main(place: str, folder: str) -> int:
    """Be the agent of this node. 28: a full disk; 2: any other reason, on stderr; 15: ended."""
    run_dir, here = Path(folder), socket.gethostname()
    job = files.read_record(run_dir / files.JOB_JSON, files.Job)
    if job is None:
        sys.stderr.write(f"{run_dir / files.JOB_JSON} cannot be read on this node\n")
        return 2
    try:
        agent = Agent(run_dir, job, pkgutil.resolve_name(place)())
        here = agent.place.node
        agent.run()
    except (OSError, RunbookError) as error:
        sys.stderr.write(f"node {here}: {error}\n")
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        return errno.ENOSPC if full else 2
    # To a cluster whoever ends well was not cut off.
    return signal.SIGTERM if agent.stopped_by else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
