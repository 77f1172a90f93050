"""What the kernel tells of a process: its state, how it ended, what its groups lack or may have."""

from __future__ import annotations

import fcntl
import select
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from runbook.process.reaper import TOKEN_VARIABLE, environment_holds

# linux/pidfd.h, since Linux 6.15: struct pidfd_info as of its first version, 64 bytes.
_PIDFD_INFO = struct.Struct("=QQ11Ii")
_PIDFD_GET_INFO = (3 << 30) | (_PIDFD_INFO.size << 16) | (0xFF << 8) | 11
_PIDFD_INFO_EXIT = 1 << 3
# Fields of /proc/PID/stat, counted from 1 as in proc_pid_stat(5).
_PARENT_FIELD, _MEMORY_FIELD, _EXIT_FIELD = 4, 23, 52
_ASK_FOR_S = 0.2
_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third, `state`, on; none if the process is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    # The name in parentheses may hold anything, so fields count from the last one.
    return text.rpartition(")")[2].split()


def process_state(pid: int | None) -> str:
    """The kernel's one-letter state of a process, or an empty string if it cannot be read."""
    fields = _stat(pid) if pid is not None else []
    return fields[0] if fields else ""


def processor_s(pid: int) -> float | None:
    """Processor time of all threads of a process so far, s; None if the kernel does not tell.

    The clock that `time.process_time` reads in that process; what runs on another processor counts
    up to its last tick.
    """
    try:
        # MAKE_PROCESS_CPUCLOCK of linux/posix-timers.h, with CPUCLOCK_SCHED.
        return time.clock_gettime(~pid << 3 | 2)
    except (OSError, OverflowError):
        return None


def has_ended_under(pid: int, handle: int, token: str, variable: str = TOKEN_VARIABLE) -> bool:
    """Has the process ended, and its parent, which carries the token, not waited for it yet?

    A process that ends loses its memory first, and with it what tells that it carried the token
    itself; it is a zombie a moment later. `handle` is its pidfd. True as well if the parent has
    waited for it meanwhile.
    """
    fields = _stat(pid)
    if not fields:
        return True
    if fields[_MEMORY_FIELD - 3] != "0":
        return False
    poller = select.poll()
    poller.register(handle, select.POLLIN)
    if not poller.poll(_ASK_FOR_S * 1000):
        return False
    return environment_holds(int(fields[_PARENT_FIELD - 3]), token, variable)


def exit_code_of(pid: int, handle: int) -> int | None:
    """The exit code of an ended process, negative for a signal; None if nobody knows any more.

    `handle` is its pidfd, which must have been opened while it lived. Until the parent has waited
    for it, the kernel tells in /proc; afterwards only newer kernels do, through the pidfd.
    """
    deadline = time.monotonic() + _ASK_FOR_S
    while True:
        status = _of_zombie(pid)
        if status is None:
            status = _of_handle(handle)
        if status is not None:
            number = status & 0x7F
            return -number if number else status >> 8
        # Between "ended" and "a zombie" there is a moment in which neither place knows.
        if time.monotonic() > deadline or not Path(f"/proc/{pid}").exists():
            return None
        time.sleep(0.002)


def _of_zombie(pid: int) -> int | None:
    fields = _stat(pid)
    if len(fields) < _EXIT_FIELD - 2 or fields[0] != "Z":
        return None
    return int(fields[_EXIT_FIELD - 3])


def _of_handle(handle: int) -> int | None:
    request = bytearray(_PIDFD_INFO.size)
    _PIDFD_INFO.pack_into(request, 0, _PIDFD_INFO_EXIT, *([0] * 13))
    try:
        fcntl.ioctl(handle, _PIDFD_GET_INFO, request)
    except OSError:
        return None
    mask, *_, status = _PIDFD_INFO.unpack(request)
    return status if mask & _PIDFD_INFO_EXIT else None


def oom_kills(root: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> int | None:
    """The `oom_kill` counter of the group that this process is in; None if it cannot be read."""
    files = _group_files("memory", "memory.events", "memory.oom_control", root, membership)
    return next((count for file in files if (count := _counter(file)) is not None), None)


def group_tasks(root: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> int | None:
    """How many processes and threads the groups of this process may have; None for any number."""
    files = _group_files("pids", "pids.max", "pids.max", root, membership)
    return min((limit for file in files if (limit := _whole(file)) is not None), default=None)


def _group_files(
    controller: str, unified: str, own: str, root: Path, membership: Path
) -> Iterator[Path]:
    """A controller's file in the group of this process and in those above it, the nearest first.

    It is called `unified` in version 2 of control groups and `own` in version 1.
    """
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        top = root / controller if controllers else root
        folder = top / group.lstrip("/")
        for place in (folder, *folder.parents):
            if place.is_relative_to(top):
                yield place / (own if controllers else unified)


def _whole(path: Path) -> int | None:
    try:
        return int(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None


def _counter(path: Path) -> int | None:
    try:
        fields = dict(line.split()[:2] for line in path.read_text("utf-8").splitlines() if line)
        return int(fields["oom_kill"])
    except (OSError, KeyError, ValueError):
        return None
