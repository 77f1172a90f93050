"""Processes of earlier launches that are still alive, found by the run token they carry.

Names are never matched: whoever carries a run token in its environment was started by a launch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["TokenProcess", "find_token_processes"]

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
