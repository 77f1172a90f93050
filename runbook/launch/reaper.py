"""Processes of earlier launches that are still alive, found by the run token they carry.

Names are never matched: whoever carries a run token in its environment was started by a launch.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# As in nsa.contract, which a program of the standard library alone cannot import.
TOKEN_VARIABLE = "RUNBOOK_RUN_TOKEN"  # noqa: S105 - the name of a variable
GOOD_BYE = b"."

_EMPTY_SCANS = 2
_PAUSE_S = 0.02


def environment_holds(pid: int, token: str) -> bool:
    """Does the process carry this token? False if it is gone, a zombie, or not ours to read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as stream:  # noqa: PTH123 - starts without pathlib
            variables = stream.read().split(b"\0")
    except OSError:
        return False
    return f"{TOKEN_VARIABLE}={token}".encode() in variables


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


def carriers(token: str) -> list[int]:
    """Pids of all live processes with the token, without this one."""
    me = os.getpid()
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208
    return [pid for pid in pids if pid != me and environment_holds(pid, token)]


@contextmanager
def owned(pid: int, token: str) -> Iterator[int | None]:
    """A pidfd of the process if it carries the token, else None.

    The token is checked after the pidfd is open: from then on the number cannot be reused by
    another process, so a signal can only reach the one that was checked.
    """
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        yield None
        return
    try:
        yield handle if environment_holds(pid, token) else None
    finally:
        os.close(handle)


def signal_owned(pid: int, token: str, number: int) -> bool:
    """Send a signal to a process with the token; False if there is no such process (any more)."""
    with owned(pid, token) as handle:
        if handle is None:
            return False
        try:
            signal.pidfd_send_signal(handle, number)
        except OSError:
            return False
        return True


def kill_all(token: str, *, within_s: float = 5.0) -> list[int]:
    """Kill everything with the token until two scans in a row find nothing.

    Returns the pids that are still there after `within_s` (empty in all but strange cases: a
    process in an uninterruptible wait dies only when that ends).
    """
    deadline = time.monotonic() + within_s
    empty = 0
    left: list[int] = []
    while empty < _EMPTY_SCANS and time.monotonic() < deadline:
        left = carriers(token)
        for pid in left:
            signal_owned(pid, token, signal.SIGKILL)
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
    return 1 if kill_all(argv[1], within_s=30.0) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))


_VARIABLE = b"RUNBOOK_RUN_TOKEN="


@dataclass(frozen=True, kw_only=True)
class TokenProcess:
    """A live process that a launch started. `orphan`: whoever started the launch is gone."""

    pid: int
    token: str
    command: str
    orphan: bool

    def __str__(self) -> str:
        state = "left over" if self.orphan else "of a live run"
        return f"pid {self.pid} token {self.token} {state}: {self.command}"


@dataclass(frozen=True, kw_only=True)
class _Seen:
    pid: int
    parent: int
    token: str


def find_token_processes(proc: Path = Path("/proc")) -> list[TokenProcess]:
    """Processes that carry a run token and may be read, without this one and its ancestors.

    A launch whose topmost process was handed to init is left over; one whose parent still lives
    belongs to a run that is going on beside this one.
    """
    table = {seen.pid: seen for entry in _process_folders(proc) if (seen := _look(entry))}
    mine = _ancestors(os.getpid(), table)
    found = []
    for seen in table.values():
        if seen.token and seen.pid not in mine:
            found.append(
                TokenProcess(
                    pid=seen.pid,
                    token=seen.token,
                    command=_command(proc / str(seen.pid)),
                    orphan=_is_orphan(seen, table),
                )
            )
    return sorted(found, key=lambda process: process.pid)


def _process_folders(proc: Path) -> list[Path]:
    return [entry for entry in proc.iterdir() if entry.name.isdigit()]


def _look(entry: Path) -> _Seen | None:
    try:
        status = (entry / "status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = dict(line.partition(":")[::2] for line in status.splitlines())
    if fields.get("State", "").strip().startswith(("Z", "X")):
        return None
    parent = int(fields.get("PPid", "0").strip() or 0)
    return _Seen(pid=int(entry.name), parent=parent, token=_token(entry))


def _token(entry: Path) -> str:
    try:
        environment = (entry / "environ").read_bytes()
    except OSError:
        # Another user's process: not ours to judge.
        return ""
    for variable in environment.split(b"\0"):
        if variable.startswith(_VARIABLE):
            return variable[len(_VARIABLE) :].decode("ascii", "replace")
    return ""


def _ancestors(pid: int, table: dict[int, _Seen]) -> set[int]:
    chain: set[int] = set()
    while pid in table and pid not in chain:
        chain.add(pid)
        pid = table[pid].parent
    return chain


def _is_orphan(seen: _Seen, table: dict[int, _Seen]) -> bool:
    top = seen
    while (parent := table.get(top.parent)) is not None and parent.token == seen.token:
        top = parent
    # Process 1 adopts what lost its parent; so does whoever leads the session tree above us.
    return top.parent <= 1 or top.parent not in table


def _command(entry: Path) -> str:
    try:
        words = (entry / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return "?"
    return b" ".join(word for word in words if word).decode("utf-8", "replace")[:200]
