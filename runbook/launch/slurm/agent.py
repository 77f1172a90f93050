"""Runs on each node of a job: `python -m runbook.launch.slurm.agent RUN_DIR`, started by srun.

It starts torchrun there, tells the harness through files how the ranks of its node are, passes its
signals on, and ends everything with its node's token when it is asked to, or dies itself.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import time
from pathlib import Path
from types import FrameType

from runbook.errors import RunbookError
from runbook.files import make_private_dir
from runbook.folder import CONSOLE_LOG
from runbook.folder.launch.lines import LineTail
from runbook.launch.command import as_typed, free_port, on_loopback, rendezvous
from runbook.launch.incident import read_outside
from runbook.launch.launcher_api import NODE_FOLDER_VARIABLE
from runbook.launch.local import Host
from runbook.launch.slurm import files
from runbook.launch.slurm.commands import node_words
from runbook.launch.slurm.ranks import OwnRanks
from runbook.process.reaper import signal_owned

_POLL_S = 0.1
_TELL_EVERY_S = 1.0
_MEET_WITHIN_S = 120.0
# Of the job, not of the launch: with them in its environment a program would think it is a task.
_FROM_SLURM = ("SLURM", "SBATCH", "PMI_", "PMIX_")


class Agent:
    """The agent of one node. `run()` is called once."""

    def __init__(self, run_dir: Path, job: files.Job, *, node: str, index: int) -> None:
        self.run_dir, self.job = run_dir, job
        self.folder = run_dir / files.NODES / node
        self.token = f"{job.run_token}.{node}"
        self.state = files.NodeState(node=node, index=index)
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
        address = _address_of(self.state.node)
        environment = self._environment(address)
        argv = self._argv(address)
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
        """Asked to by the harness, by Slurm, or alone because Slurm's own process is gone."""
        if os.getppid() != self._parent:
            self.stopped_by = self.stopped_by or "the end of slurmstepd"
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
        console = self.folder / CONSOLE_LOG
        self.state = self.state.model_copy(
            update={
                "code": code,
                "stopped_by": self.stopped_by,
                "console_bytes": console.stat().st_size if console.exists() else 0,
                "ranks": self._ranks(),
                "end": end,
            }
        )
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
                if ask.signal == files.READ_OUTSIDE:
                    read_outside(self.run_dir, state)
                else:
                    signal_owned(state.pid, self.token, ask.signal, files.NODE_TOKEN_VARIABLE)

    def _environment(self, address: str) -> dict[str, str]:
        """What the harness gave the job, without Slurm's own, and where gloo and NCCL connect."""
        found = {k: v for k, v in os.environ.items() if not k.startswith(_FROM_SLURM)}
        found[files.NODE_TOKEN_VARIABLE] = self.token
        found[NODE_FOLDER_VARIABLE] = str(self.folder)
        if self.job.nodes > 1 and (interface := _interface_of(address)):
            for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                found.setdefault(name, interface)
        elif self.job.nodes == 1:
            found.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return found

    def _argv(self, address: str) -> list[str]:
        if not self.job.torchrun:
            return list(self.job.argv)
        if self.job.nodes == 1:
            return on_loopback(self.job.argv, free_port())
        meet = self._meet(address)
        host = self.state.index == 0
        words = rendezvous(f"{meet.address}:{meet.port}", self.job.run_token)
        own = [f"--rdzv-conf=is_host={int(host)}", f"--local-addr={address}"]
        return as_typed([*words, *own, *self.job.argv])

    def _meet(self, address: str) -> files.Rendezvous:
        """Where torchrun's agents meet: the first node says it, the others read it."""
        path = self.run_dir / files.RENDEZVOUS_JSON
        if self.state.index == 0:
            files.write_record(path, files.Rendezvous(address=address, port=free_port(address)))
        deadline = time.monotonic() + _MEET_WITHIN_S
        while (found := files.read_record(path, files.Rendezvous)) is None:
            if time.monotonic() > deadline or self._must_stop():
                raise RunbookError(f"the first node has not written {path} yet")
            time.sleep(_POLL_S)
            self._answer()
            self._tell_in_time()
        return found


def _address_of(node: str) -> str:
    """The address by which the other nodes reach this one. Raises RunbookError."""
    name = node_words(node).get("NodeAddr") or node
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise RunbookError(f"{name}, the address of node {node}, is not known: {error}") from error


def _interface_of(address: str) -> str:
    """The network interface that has the address; empty if none has."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return name
    return ""


def main(argv: list[str]) -> int:
    """The agent of the node that this runs on. 28: a full disk; 2: any other reason, on stderr."""
    run_dir = Path(argv[0])
    job = files.read_record(run_dir / files.JOB_JSON, files.Job)
    if job is None:
        sys.stderr.write(f"{run_dir / files.JOB_JSON} cannot be read on this node\n")
        return 2
    node, index = os.environ["SLURMD_NODENAME"], int(os.environ["SLURM_NODEID"])
    try:
        Agent(run_dir, job, node=node, index=index).run()
    except (OSError, RunbookError) as error:
        sys.stderr.write(f"node {node}: {error}\n")
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        return errno.ENOSPC if full else 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
