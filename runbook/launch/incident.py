"""Evidence of an incident, collected before anything is killed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from nsa.contract import STACKDUMPS
from runbook.files import write_atomic
from runbook.launch.flight import flight_files
from runbook.launch.ranks import RankState
from runbook.launch.reaper import signal_owned
from runbook.launch.watchdog import STOPPED, process_state

__all__ = ["busy_ranks", "collect_flights", "collect_stacks", "python_place", "write_summary"]

_FRAME = re.compile(r'^  File "([^"]*)", line (\d+) in (\S+)', re.MULTILINE)


_STACKS_WITHIN_S = 1.0
_FLIGHTS_WITHIN_S = 0.5
_TOOL_WITHIN_S = 3.0


Send = Callable[[RankState, int], bool]


def collect_stacks(
    run_dir: Path, ranks: Sequence[RankState], *, token: str, send: Send | None = None
) -> list[Path]:
    """Have the Python stacks of all ranks written into `run_dir` and return the files.

    They come from the trainer itself (SIGUSR1, handled in C, so that a rank that is stuck in
    native code answers too). A rank that cannot answer, because it is frozen, is read from outside
    by py-spy where that is installed.
    """
    alive = [state for state in ranks if state.pid is not None and state.died_at is None]
    able = [state for state in alive if process_state(state.pid) not in STOPPED]
    before = {state.rank: _stack_files(run_dir, state.rank) for state in able}
    for state in able:
        (send or _to_owned(token))(state, signal.SIGUSR1)
    files = _wait_for_stacks(run_dir, before)
    silent = [state for state in alive if not any(f"rank{state.rank}_" in p.name for p in files)]
    files += [path for state in silent if (path := _read_from_outside(run_dir, state))]
    return files


def collect_flights(
    run_dir: Path, ranks: Sequence[RankState], *, token: str, send: Send | None = None
) -> list[Path]:
    """Have every rank that can answer write its flight record (SIGUSR2); return the fresh ones.

    A thread of the rank answers, so one that is stuck in a collective or sleeps answers too; one
    that is frozen, or holds the interpreter's lock, does not.
    """
    able = [
        state
        for state in ranks
        if state.pid is not None
        and state.died_at is None
        and process_state(state.pid) not in STOPPED
    ]
    before = {rank: path.stat().st_mtime_ns for rank, path in flight_files(run_dir).items()}
    signal_to = send or _to_owned(token)
    asked = {state.rank for state in able if signal_to(state, signal.SIGUSR2)}
    deadline = time.monotonic() + _FLIGHTS_WITHIN_S
    while True:
        now = flight_files(run_dir)
        fresh = {r for r in asked & now.keys() if now[r].stat().st_mtime_ns != before.get(r)}
        if fresh == asked or time.monotonic() > deadline:
            return [now[rank] for rank in sorted(fresh)]
        time.sleep(0.01)


def _to_owned(token: str) -> Send:
    """Only a process that carries the token gets a signal."""
    return lambda state, number: state.pid is not None and signal_owned(state.pid, token, number)


def busy_ranks(files: Sequence[Path]) -> frozenset[int]:
    """Ranks whose main thread is in code of its own: not inside torch, waiting for the others."""
    busy = set()
    for path in files:
        rank = STACKDUMPS.rank_of(path.name)
        innermost = _innermost_file(path.read_text("utf-8", "replace")) if rank is not None else ""
        if rank is not None and innermost and "/torch/" not in innermost:
            busy.add(rank)
    return frozenset(busy)


def python_place(path: Path) -> str:
    """`file.py:12 in name`: where the main thread of a dumped rank is, in code of its own."""
    for name, line, function in _main_frames(path.read_text("utf-8", "replace")):
        if "/torch/" not in name:
            return f"{name}:{line} in {function}"
    return ""


def _innermost_file(dump: str) -> str:
    """The file of the newest frame of the main thread, in the last dump that the text holds."""
    frames = _main_frames(dump)
    return frames[0][0] if frames else ""


def _main_frames(dump: str) -> list[tuple[str, str, str]]:
    """(file, line, function), the newest first, of the main thread in the text's last dump."""
    found: list[tuple[str, str, str]] = []
    for thread in re.split(r"^(?:Current thread|Thread) ", dump, flags=re.MULTILINE)[1:]:
        frames = _FRAME.findall(thread)
        # The main thread is the one that was entered through a module.
        if frames and frames[-1][2] in ("<module>", "_run_module_as_main"):
            found = frames
    return found


def _stack_files(run_dir: Path, rank: int) -> dict[Path, int]:
    return {path: path.stat().st_size for path in run_dir.glob(STACKDUMPS.glob(rank))}


def _wait_for_stacks(run_dir: Path, before: dict[int, dict[Path, int]]) -> list[Path]:
    """Stack files that have grown and stopped growing."""
    deadline = time.monotonic() + (_STACKS_WITHIN_S if before else 0.0)
    last: dict[Path, int] = {}
    while time.monotonic() < deadline:
        time.sleep(0.03)
        now: dict[Path, int] = {}
        grown = 0
        for rank, sizes in before.items():
            files = _stack_files(run_dir, rank)
            fresh = {path: size for path, size in files.items() if size > sizes.get(path, 0)}
            now |= fresh
            grown += bool(fresh)
        if grown == len(before) and now == last:
            break
        last = now
    return sorted(last)


def _read_from_outside(run_dir: Path, state: RankState) -> Path | None:
    tool = shutil.which("py-spy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}")
    if tool is None or state.pid is None:
        return None
    command = [tool, "dump", "--nonblocking", "--pid", str(state.pid)]
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=_TOOL_WITHIN_S, check=False, text=True
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if not done.stdout.strip():
        return None
    path = run_dir / STACKDUMPS.name(state.rank, "outside")
    path.write_text(done.stdout, encoding="utf-8")
    return path


def write_summary(run_dir: Path, ranks: Sequence[RankState], cause: str) -> Path:
    """Write `incident.json`: the cause, and of each rank its state and last heartbeats."""
    document = {
        "schema_version": 1,
        "cause": cause,
        "ranks": [
            {
                "rank": state.rank,
                "pid": state.pid,
                "process_state": process_state(state.pid) if state.died_at is None else "gone",
                "waits_in": _kernel_wait(state.pid) if state.died_at is None else "",
                "silent_s": round(time.monotonic() - state.changed_at, 3),
                "phase": state.phase,
                "step": state.step,
                "last_heartbeats": state.recent,
            }
            for state in ranks
        ],
    }
    path = run_dir / "incident.json"
    write_atomic(path, json.dumps(document, indent=2, default=str) + "\n")
    return path


def _kernel_wait(pid: int | None) -> str:
    try:
        return Path(f"/proc/{pid}/wchan").read_text(encoding="utf-8")
    except OSError:
        return ""
