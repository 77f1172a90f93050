"""Processes of launches that are alive now: of a run beside this one, or left over from one.

Whoever carries a run token in its environment was started by a launch; names are never matched.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import psutil

from nsa.contract import RUN_TOKEN_VARIABLE

_LONGEST_COMMAND = 200
# Process 1 adopts what lost its parent, unless a subreaper above us does.
_INIT = 1


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
class Seen:
    """What is asked of a process; `token` is empty where it has none or may not be read."""

    pid: int
    parent: int
    token: str = ""
    command: str = ""


def find_token_processes(processes: Iterable[Seen] | None = None) -> list[TokenProcess]:
    """Processes that carry a run token and may be read, without this one and its ancestors.

    A launch whose topmost process was handed to init is left over; one whose parent still lives
    belongs to a run that is going on beside this one.
    """
    table = {seen.pid: seen for seen in (live_processes() if processes is None else processes)}
    mine = {parent.pid for parent in psutil.Process().parents()} | {psutil.Process().pid}
    return [
        TokenProcess(
            pid=seen.pid, token=seen.token, command=seen.command, orphan=_is_orphan(seen, table)
        )
        for seen in sorted(table.values(), key=lambda seen: seen.pid)
        if seen.token and seen.pid not in mine
    ]


def live_processes() -> list[Seen]:
    """All processes but zombies; an environment that may not be read holds no token."""
    return [seen for pid in psutil.pids() if (seen := _look(pid)) is not None]


def _look(pid: int) -> Seen | None:
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                return None
            parent = process.ppid()
            try:
                token = process.environ().get(RUN_TOKEN_VARIABLE, "")
                words = process.cmdline() if token else []
            except (psutil.AccessDenied, OSError):
                # Another user's process: not ours to judge.
                return Seen(pid=pid, parent=parent)
    except psutil.NoSuchProcess:
        return None
    command = " ".join(words)[:_LONGEST_COMMAND]
    return Seen(pid=pid, parent=parent, token=token, command=command)


def _is_orphan(seen: Seen, table: dict[int, Seen]) -> bool:
    top = seen
    while (parent := table.get(top.parent)) is not None and parent.token == seen.token:
        top = parent
    # Whoever leads the session tree above us adopts as init does, and may be out of our sight.
    return top.parent <= _INIT or top.parent not in table
