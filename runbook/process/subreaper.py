"""Stands above a launch's command: nothing that the command starts leaves its tree of processes.

`python -I -S subreaper.py`, standard library alone. Whatever becomes an orphan below the command
becomes a child of this process, whatever it did to its session and its environment. Command and
environment come through the pipe on stdin. When the command has ended, or the other end of the pipe
is closed (the harness asks, or is gone), everything below is killed, and this ends as the command
did: with its exit code, or by its signal.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

# Of <linux/prctl.h>.
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36
_CANNOT_START = 127
_PAUSE_S = 0.005
# As long as the harness tries to end what has the token, and longer where it is gone.
_AFTER_COMMAND_S, _WITHOUT_HARNESS_S = 5.0, 30.0
# It ends by the pipe alone: whoever signals everybody must not open the cage first.
_DEAF_TO = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def packed(command: Sequence[str], environment: Mapping[str, str]) -> bytes:
    """The order as it goes through the pipe: one line."""
    return json.dumps([list(command), dict(environment)]).encode() + b"\n"


def _order() -> tuple[list[str], dict[str, str]] | None:
    """Command and environment; None if the harness was gone before it had said them."""
    data = b""
    while not data.endswith(b"\n"):
        if not (more := os.read(0, 1 << 16)):
            return None
        data += more
    command, environment = json.loads(data)
    return command, environment


def _start(command: Sequence[str], environment: Mapping[str, str], libc: ctypes.CDLL) -> int:
    """Start the command, in a session of its own and with the death signal; returns its pid."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _DEAF_TO}
    me = os.getpid()
    if pid := os.fork():
        return pid
    for number, handler in before.items():
        signal.signal(number, handler)
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # It survives exec, so the command is killed as soon as this process is gone, however it went.
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != me:
        os.kill(os.getpid(), signal.SIGKILL)  # it went before the signal was set
    # A request for stacks or records that comes before the trainer has a handler must not kill it.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        os.execvpe(command[0], list(command), environment)  # noqa: S606 - no shell
    except OSError as error:
        may = f"; chmod +x {command[0]}" if isinstance(error, PermissionError) else ""
        sys.stderr.write(f"cannot start {command[0]}: {error.strerror}{may}\n")
        sys.stderr.flush()
    os._exit(_CANNOT_START)


def _reap(wanted: int, status: int | None) -> tuple[int | None, bool]:
    """Take leave of all that ended: the status of the command, and is a child left?"""
    while True:
        try:
            pid, ended = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status, False
        if pid == 0:
            return status, True
        if pid == wanted:
            status = ended


def _wait(command: int) -> int | None:
    """The command's status when it has ended; None if the harness closed the pipe before."""
    woken, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    poller = select.poll()
    poller.register(0, select.POLLIN)
    poller.register(woken, select.POLLIN)
    while True:
        status, _ = _reap(command, None)
        if status is not None:
            return status
        ready = {handle for handle, _ in poller.poll()}
        if 0 in ready and not os.read(0, 1):
            return None
        if woken in ready:
            os.read(woken, 4096)


def _children() -> list[int]:
    """Its children by the kernel's list; none of these numbers can be another's before `_reap`."""
    me, found = str(os.getpid()), []
    for name in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208 - starts without pathlib
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as stream:  # noqa: PTH123
                # The name in parentheses may hold anything, so fields count from the last one.
                parent = stream.read().rpartition(")")[2].split()[1]
        except (OSError, IndexError):
            continue
        if parent == me:
            found.append(int(name))
    return found


def _end_all(command: int, status: int | None, within_s: float) -> int | None:
    """Kill every child until there is none: theirs become its own. Returns the command's status."""
    deadline = time.monotonic() + within_s
    while True:
        status, left = _reap(command, status)
        if not left or time.monotonic() > deadline:
            return status
        for pid in _children():
            with suppress(PermissionError):  # one that became another user's (sudo)
                os.kill(pid, signal.SIGKILL)
        time.sleep(_PAUSE_S)


def _end_as(status: int, libc: ctypes.CDLL) -> None:
    """End as the command did, without a core of its own."""
    if os.WIFSIGNALED(status):
        libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


def main() -> int:
    """Keep one command. 1: there was nothing to do, or it could not be ended."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        sys.stderr.write(f"subreaper: adopts no orphans: {os.strerror(ctypes.get_errno())}\n")
        return 1
    if (order := _order()) is None:
        return 1
    command = _start(*order, libc)
    status = _wait(command)
    within_s = _WITHOUT_HARNESS_S if status is None else _AFTER_COMMAND_S
    status = _end_all(command, status, within_s)
    if status is None:
        return 1
    _end_as(status, libc)
    return 1


if __name__ == "__main__":
    sys.exit(main())
