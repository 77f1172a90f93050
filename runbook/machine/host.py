"""What the host has: processors, memory, disk, ports, processes of launches, and torch.

torch is asked in a process of its own: this program never imports it. A trainer is a process that
carries a run token in its environment, or one of anybody that runs the trainer's module. They are
named; only a token ever lets a process be signaled.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from nsa.contract import RUN_TOKEN_VARIABLE
from runbook.files import text_there
from runbook.process import NO_VARIABLES, run_tool

# The port that torchrun takes unless told otherwise.
DEFAULT_RENDEZVOUS_PORT = 29500

_GIB = 1024**3
_MIB = 1024**2
_PROBE_MIB = 64
_TIMEOUT_S = 180.0
_MARK = "@@runbook@@"


def count_cpus() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


def memory_total_gib(cgroup: Path = Path("/sys/fs/cgroup")) -> float:
    """Memory of the machine, or of the container where that is less."""
    total, limit = psutil.virtual_memory().total, text_there(cgroup / "memory.max").strip()
    return min(total, int(limit) if limit.isdigit() else total) / _GIB


def write_speed_mib_s(folder: Path, *, size_mib: int = _PROBE_MIB) -> float:
    """Write and sync a file that has no name and is gone afterwards. Raises OSError."""
    # Random bytes, because some file systems do not store zeros.
    block = os.urandom(_MIB)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as probe:
        started = time.perf_counter()
        for _ in range(size_mib):
            probe.write(block)
        os.fsync(probe.fileno())
        return size_mib / (time.perf_counter() - started)


def port_holder(port: int = DEFAULT_RENDEZVOUS_PORT) -> str | None:
    """The process that holds a port, empty if it cannot be seen; None where the port is free.

    It is bound on all interfaces for a moment, as torchrun's store would.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return _port_owner(port)
    return None


def _port_owner(port: int) -> str:
    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied:
        return ""
    pids = {item.pid for item in connections if item.laddr and item.laddr.port == port and item.pid}
    owners = []
    for pid in sorted(pids):
        try:
            owners.append(f"pid {pid} ({psutil.Process(pid).name()})")
        except psutil.NoSuchProcess:
            continue
    return ", ".join(owners)


def find_infiniband(root: Path = Path("/sys/class/infiniband")) -> dict[str, str]:
    """Ports of InfiniBand devices with their state, such as {"mlx5_0/1": "ACTIVE"}.

    Ports whose link layer is Ethernet (RoCE) are listed with that word behind the state.
    """
    found = {}
    for state in sorted(root.glob("*/ports/*/state")):
        name = f"{state.parents[2].name}/{state.parent.name}"
        word = text_there(state).strip().rpartition(":")[2].strip()
        layer = text_there(state.parent / "link_layer").strip()
        found[name] = word if layer in ("", "InfiniBand") else f"{word} {layer}"
    return found


_LONGEST_COMMAND = 200
# Process 1 adopts what lost its parent, unless a subreaper above us does.
_INIT = 1
# What runs a trainer, as the first or (a script with an interpreter) second word of its command.
_INTERPRETERS = ("python", "torchrun")
# The trainer's script in the documents (requirements P11 and T9).
_DOCUMENTED = "train_showcase.py"


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A live process, and the words of its command. `orphan`: whoever started it is gone.

    `token` is that of the launch, empty for a process that somebody else started.
    """

    pid: int
    parent: int
    token: str = ""
    words: tuple[str, ...] = ()
    orphan: bool = False

    def __str__(self) -> str:
        state = "left over" if self.orphan else "of a live run"
        named = f" token {self.token}" if self.token else ""
        return f"pid {self.pid}{named} {state}: {' '.join(self.words)[:_LONGEST_COMMAND]}"


def find_trainers(
    processes: Iterable[Seen] | None = None, *, trainer: str = "nsa.train"
) -> list[Seen]:
    """Processes of trainers, without this one and its ancestors.

    A tree of them whose top was handed to init is left over; one whose parent still lives belongs
    to a run that is going on beside this one.
    """
    every = live_processes() if processes is None else processes
    table = {seen.pid: seen for seen in every}
    mine = {parent.pid for parent in psutil.Process().parents()} | {psutil.Process().pid}
    return [
        replace(seen, orphan=_is_orphan(seen, table, trainer))
        for seen in sorted(table.values(), key=lambda seen: seen.pid)
        if seen.pid not in mine and _trains(seen, trainer)
    ]


def _trains(seen: Seen, trainer: str) -> bool:
    """Does it carry a token, or does Python, itself or as torchrun, run the trainer in it?

    An editor or a pager that has the script's name among its words trains nothing.
    """
    if seen.token:
        return True
    program = [Path(word).name for word in seen.words[:2]]
    if not any(name.startswith(_INTERPRETERS) for name in program):
        return False
    modules = [word for flag, word in pairwise(seen.words) if flag == "-m"]
    return trainer in modules or any(Path(word).name == _DOCUMENTED for word in seen.words[1:])


def live_processes() -> list[Seen]:
    """All processes but zombies; an environment that may not be read holds no token."""
    return [seen for pid in psutil.pids() if (seen := _look(pid)) is not None]


def _look(pid: int) -> Seen | None:
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                return None
            parent, words = process.ppid(), tuple(process.cmdline())
            try:
                token = process.environ().get(RUN_TOKEN_VARIABLE, "")
            except (psutil.AccessDenied, OSError):
                token = ""  # another user's
    except psutil.NoSuchProcess:
        return None
    except psutil.AccessDenied:
        return Seen(pid=pid, parent=_INIT)
    return Seen(pid=pid, parent=parent, token=token, words=words)


def _is_orphan(seen: Seen, table: dict[int, Seen], trainer: str) -> bool:
    top = seen
    while (parent := table.get(top.parent)) is not None and parent.token == seen.token:
        if not _trains(parent, trainer):
            break
        top = parent
    # Whoever leads the session tree above us adopts as init does, and may be out of our sight.
    return top.parent <= _INIT or top.parent not in table


# Two answers, the second one flushed separately: a trainer that kills the interpreter while it
# is imported must not take torch's own description with it.
_SCRIPT = """
import gc, importlib, json, sys
gc.disable()  # torch is a million objects, and this process ends soon
def say(**answer):
    print(MARK + json.dumps(answer), flush=True)
try:
    import torch
    from torch.utils.collect_env import get_pretty_env_info
    count = torch.cuda.device_count()
    say(version=torch.__version__, cuda_available=torch.cuda.is_available(),
        device_count=count, cuda=torch.version.cuda, collect_env=get_pretty_env_info())
    if count:
        say(nccl=".".join(map(str, torch.cuda.nccl.version())))
except Exception as error:
    say(problem=f"{type(error).__name__}: {error}")
try:
    importlib.import_module(TRAINER)
    say(trainer_imports=True)
except Exception as error:
    say(trainer_imports=False, trainer_error=f"{type(error).__name__}: {error}")
"""


@dataclass(frozen=True, kw_only=True)
class TorchFacts:
    """The answers; None and a `problem` where torch could not be asked.

    `cuda` is the CUDA that torch was built for, None for a build without; `nccl` is None where
    torch sees no GPU.
    """

    version: str | None = None
    cuda_available: bool | None = None
    device_count: int | None = None
    cuda: str | None = None
    nccl: str | None = None
    collect_env: str = ""
    trainer_imports: bool = False
    trainer_error: str = ""
    problem: str = ""


def ask_torch(
    *,
    trainer: str = "nsa.train",
    cwd: Path | None = None,
    variables: Mapping[str, str] = NO_VARIABLES,
) -> TorchFacts:
    """Describe torch as `python -m torch.utils.collect_env` does, and import the trainer.

    `variables` are set as in a launch, so that torch sees the devices that a launch would see.
    """
    script = f"MARK = {_MARK!r}\nTRAINER = {trainer!r}\n{_SCRIPT}"
    # -P: the current folder must not be able to stand in for a package.
    command = [sys.executable, "-P", "-c", script]
    result = run_tool(command, timeout_s=_TIMEOUT_S, cwd=cwd, variables=variables)
    answer: dict[str, Any] = {}
    for line in result.stdout.splitlines():
        if line.startswith(_MARK):
            answer.update(json.loads(line.removeprefix(_MARK)))
    facts = TorchFacts(**answer)
    error = facts.trainer_error or ("" if facts.trainer_imports else result.problem or "no answer")
    problem = facts.problem
    if facts.version is None and not problem:
        problem = result.problem or "torch gave no answer"
    return replace(facts, trainer_error=error, problem=problem)
