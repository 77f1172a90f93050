"""Ends everything of a launch: the processes that carry its run token, found and killed by it.

Names are never matched: whoever carries a run token in its environment was started by a launch.
Also a program of the standard library alone (`python -I -S reaper.py TOKEN VARIABLE`), which waits
beside a run for the harness to die.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

# As in nsa.contract, which a program of the standard library alone cannot import.
TOKEN_VARIABLE = "RUNBOOK_RUN_TOKEN"  # noqa: S105 - the name of a variable
GOOD_BYE = b"."

_EMPTY_SCANS = 2
_PAUSE_S = 0.02


def environment_holds(pid: int, token: str, variable: str = TOKEN_VARIABLE) -> bool:
    """Does the process carry this token? False if it is gone, a zombie, or not ours to read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as stream:  # noqa: PTH123 - starts without pathlib
            variables = stream.read().split(b"\0")
    except OSError:
        return False
    return f"{variable}={token}".encode() in variables


def holds_file(pid: int, path: str) -> bool:
    """Has the process this file open? Tells a rank that was started by hand, without a token."""
    folder = f"/proc/{pid}/fd"
    try:
        wanted = os.stat(path)  # noqa: PTH116 - starts without pathlib
        for name in os.listdir(folder):  # noqa: PTH208
            try:
                seen = os.stat(f"{folder}/{name}")  # noqa: PTH116
            except OSError:
                continue
            if (seen.st_dev, seen.st_ino) == (wanted.st_dev, wanted.st_ino):
                return True
    except OSError:
        return False
    return False


def carriers(token: str, variable: str = TOKEN_VARIABLE) -> list[int]:
    """Pids of all live processes with the token, without this one."""
    me = os.getpid()
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208
    return [pid for pid in pids if pid != me and environment_holds(pid, token, variable)]


@contextmanager
def owned(
    pid: int, token: str, variable: str = TOKEN_VARIABLE, *, path: str = ""
) -> Iterator[int | None]:
    """A pidfd of the process if it carries the token, or has the file open; else None.

    That is checked after the pidfd is open: from then on the number cannot be reused by
    another process, so a signal can only reach the one that was checked.
    """
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        yield None
        return
    try:
        ours = environment_holds(pid, token, variable) or (path and holds_file(pid, path))
        yield handle if ours else None
    finally:
        os.close(handle)


def signal_owned(
    pid: int, token: str, number: int, variable: str = TOKEN_VARIABLE, *, path: str = ""
) -> bool:
    """Send a signal to a process that is `owned`; False if there is no such one (any more)."""
    with owned(pid, token, variable, path=path) as handle:
        if handle is None:
            return False
        try:
            signal.pidfd_send_signal(handle, number)
        except OSError:
            return False
        return True


def kill_all(token: str, variable: str = TOKEN_VARIABLE, *, within_s: float = 5.0) -> list[int]:
    """Kill everything with the token until two scans in a row find nothing.

    Returns the pids that are still there after `within_s` (empty in all but strange cases: a
    process in an uninterruptible wait dies only when that ends).
    """
    deadline = time.monotonic() + within_s
    empty = 0
    left: list[int] = []
    while empty < _EMPTY_SCANS and time.monotonic() < deadline:
        left = carriers(token, variable)
        for pid in left:
            signal_owned(pid, token, signal.SIGKILL, variable)
        empty = 0 if left else empty + 1
        if left:
            time.sleep(_PAUSE_S)
    return left


def main(argv: list[str]) -> int:
    """Wait for the pipe to close; a good-bye byte means that there is nothing left to do."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    last = b""
    while data := os.read(0, 64):
        last = data[-1:]
    if last == GOOD_BYE:
        return 0
    return 1 if kill_all(argv[1], argv[2], within_s=30.0) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
