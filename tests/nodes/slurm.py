"""A Slurm cluster on this machine alone: `python -m tests.nodes.slurm up|down FOLDER`.

One slurmctld, one munged and a slurmd for each node, all on the loopback interface, with a key, a
socket and ports of their own, so that it meets no other Slurm. Everything lies in FOLDER; what was
started is written to FOLDER/pids, and `down` ends exactly that.
"""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "scancel", "srun", "munged")
_SYSTEM = f"{os.defpath}:/usr/sbin:/usr/local/sbin"
_UP_WITHIN_S = 90.0


def missing_programs() -> list[str]:
    """Programs of the packages slurmctld, slurmd, slurm-client and munge that are not here."""
    return [name for name in PROGRAMS if shutil.which(name, path=_SYSTEM) is None]


class Cluster:
    """The nodes n0, n1, ... with two CPUs each; `environment` makes Slurm's tools talk to it."""

    def __init__(self, folder: Path, nodes: int = 2) -> None:
        self.folder = folder.resolve()
        self.names = tuple(f"n{index}" for index in range(nodes))
        self.environment = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        self._children: dict[int, subprocess.Popen[bytes]] = {}

    def up(self) -> None:
        """Start everything and wait until all nodes are idle."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in ("state", "spool", "log"):
            (self.folder / name).mkdir(exist_ok=True)
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o600)
        (self.folder / "slurm.conf").write_text(self._configuration())
        where = {
            "key-file": key,
            "socket": self._socket,
            "pid-file": self.folder / "munged.pid",
            "log-file": self.folder / "log/munged",
            "seed-file": self.folder / "munge.seed",
        }
        options = [f"--{name}={path}" for name, path in where.items()]
        self._start("munged", "--foreground", "--force", "--num-threads=2", *options)
        self._until(self._socket.exists, "munged")
        self._start("slurmctld", "-D", "-i")
        for name in self.names:
            self.start_node(name)
        self.wait_idle()

    def wait_idle(self) -> None:
        """Wait until every node can take a job and no job is left."""
        idle = ["idle"] * len(self.names)
        self._until(lambda: self.states() == idle and not self.left(), "nodes idle")

    def down(self) -> None:
        """End all jobs, the daemons and whatever they started."""
        # Whatever does not answer: the daemons end.
        with suppress(subprocess.SubprocessError, TimeoutError):
            self.tool("scancel", "--user", getpass.getuser())
            self._until(lambda: not self.left(), "no jobs")
        for pid in reversed(self._pids()):
            self._kill_tree(pid)
        (self.folder / "pids").unlink(missing_ok=True)

    def start_node(self, name: str) -> None:
        """The daemon of a node, for the first time or after `power_off`."""
        self._start("slurmd", "-D", "-N", name)

    def power_off(self, name: str) -> None:
        """What a power cut does: the daemon and all that it started end at the same moment.

        Nobody waits until they have.
        """
        threading.Thread(target=self._kill_node, args=(name,)).start()

    def _kill_node(self, name: str) -> None:
        mine = (self.environment["SLURM_CONF"], name)
        found: list[psutil.Process] = []
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                told = process.environ()
                daemon = process.pid in self._children and process.cmdline()[-1:] == [name]
                if daemon or (told.get("SLURM_CONF"), told.get("SLURMD_NODENAME")) == mine:
                    found.append(process)
                    found += process.children(recursive=True)
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in found:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
        for process in found:
            if process.pid in self._children:
                self._children.pop(process.pid).wait()

    def power_on(self, name: str) -> None:
        """What an operator does with a node that was down: its jobs are given up, it may return."""
        for words in (("state=down", "reason=lost"), ("state=resume",)):
            self.tool("scontrol", "update", f"nodename={name}", *words)
        self.start_node(name)
        self.wait_idle()

    def states(self) -> list[str]:
        """The state of each node, as sinfo says it."""
        said = self.tool("sinfo", "--noheader", "--Node", "--format=%T")
        return said.split()

    def left(self) -> list[str]:
        """Every job that Slurm has not done with: `id name state`."""
        said = self.tool("squeue", "--noheader", "--states=all", "--format=%i %j %T")
        over = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "DEADLINE")
        return [line for line in said.splitlines() if line.split()[-1] not in over]

    def tool(self, *command: str) -> str:
        """What a tool of Slurm prints. Raises CalledProcessError with what it said."""
        program = shutil.which(command[0], path=_SYSTEM) or command[0]
        done = subprocess.run(
            [program, *command[1:]],
            env=os.environ | self.environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        return done.stdout

    @property
    def _socket(self) -> Path:
        return self.folder / "munge.socket"

    def _start(self, program: str, *words: str) -> None:
        path = shutil.which(program, path=_SYSTEM)
        assert path is not None, f"{program} is not installed"
        name = "-".join([program, *words[-1:]]) if program == "slurmd" else program
        with (self.folder / f"log/{name}.out").open("ab") as output:
            started = subprocess.Popen(
                [path, *words],
                env={"PATH": _SYSTEM, "HOME": "/", **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._children[started.pid] = started
        with (self.folder / "pids").open("a") as stream:
            stream.write(f"{started.pid}\n")

    def _kill_tree(self, pid: int) -> None:
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(pid)
            for process in [*root.children(recursive=True), root]:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
        if pid in self._children:
            self._children.pop(pid).wait()

    def _pids(self) -> list[int]:
        path = self.folder / "pids"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def _until(self, done: object, what: str) -> None:
        assert callable(done)
        deadline = time.monotonic() + _UP_WITHIN_S
        while time.monotonic() < deadline:
            with suppress(subprocess.SubprocessError):
                if done():
                    return
            time.sleep(0.1)
        raise TimeoutError(f"{what}: not within {_UP_WITHIN_S:g} s; see {self.folder}/log")

    def _configuration(self) -> str:
        controller, *ports = _free_ports(len(self.names) + 1)
        text = Path(__file__).with_name("slurm.conf").read_text("utf-8")
        nodes = [
            f"NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=2 "
            "RealMemory=1000 State=UNKNOWN\n"
            for name, port in zip(self.names, ports, strict=True)
        ]
        return text.format(
            folder=self.folder,
            socket=self._socket,
            port=controller,
            user=getpass.getuser(),
            nodes="".join(nodes),
            names=",".join(self.names),
        )


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket(socket.AF_INET, socket.SOCK_STREAM) for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    found = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return found


def main(words: Sequence[str]) -> int:
    """`up FOLDER [NODES]` prints the variable to export; `down FOLDER`."""
    if len(words) < 2 or words[0] not in ("up", "down"):
        print("usage: python -m tests.nodes.slurm up FOLDER [NODES] | down FOLDER")
        return 2
    if absent := missing_programs():
        print(f"not installed: {', '.join(absent)}; apt-get install slurm-wlm munge")
        return 1
    cluster = Cluster(Path(words[1]), int(words[2]) if len(words) > 2 else 2)
    if words[0] == "down":
        cluster.down()
        return 0
    cluster.up()
    print(f"export SLURM_CONF={cluster.environment['SLURM_CONF']}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
