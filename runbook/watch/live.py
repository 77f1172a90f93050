"""The ranks of a run directory that live now, whoever started them."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from runbook.launch.flight import read_flights
from runbook.launch.incident import collect_flights, collect_stacks
from runbook.launch.ranks import RankState, RankWatch
from runbook.launch.reaper import environment_holds, holds_file
from runbook.launch.watchdog import STOPPED, process_state
from runbook.read.heartbeats import heartbeat_files

__all__ = ["RankStack", "follow", "live_stacks", "send_checked"]


@dataclass(frozen=True, kw_only=True)
class RankStack:
    """What one live rank is doing: its stack as text (empty if it could not be read)."""

    rank: int
    pid: int
    state: str
    phase: str
    step: int
    silent_s: float
    stack: str
    last_collective: str
    path: str


def follow(run_dir: Path) -> RankWatch:
    """A view of the ranks of a directory, by the token that its heartbeats carry."""
    return RankWatch(run_dir, _token(run_dir), time.monotonic())


def send_checked(state: RankState, token: str, number: int) -> bool:
    """Signal a rank if the process is provably it: it carries the token or writes its heartbeat."""
    if state.pid is None:
        return False
    try:
        handle = os.pidfd_open(state.pid)
    except OSError:
        return False
    try:
        if not (environment_holds(state.pid, token) or holds_file(state.pid, str(state.path))):
            return False
        signal.pidfd_send_signal(handle, number)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


def live_stacks(run_dir: Path) -> list[RankStack]:
    """The stacks of every rank that is alive, now, whatever it hangs in.

    The ranks write them (stackdump and flight files in the run directory); a frozen one is read
    from outside where py-spy is installed. Empty if no rank is alive.
    """
    watch = follow(run_dir)
    watch.update()
    ranks = [s for s in watch.ranks.values() if s.handle is not None and s.exit_code is None]
    token = watch.token

    def send(state: RankState, number: int) -> bool:
        return send_checked(state, token, number)

    before = {p: p.stat().st_size for p in run_dir.glob("stackdump_rank*.txt")}
    collect_flights(run_dir, ranks, token=token, send=send)
    files = collect_stacks(run_dir, ranks, token=token, send=send)
    flights = read_flights(run_dir, token=token)
    found = []
    for state in ranks:
        path = next((p for p in files if p.name.startswith(f"stackdump_rank{state.rank}_")), None)
        flight = flights.get(state.rank)
        last = flight.collectives[-1] if flight and flight.collectives else None
        found.append(
            RankStack(
                rank=state.rank,
                pid=state.pid or 0,
                state=STOPPED.get(process_state(state.pid), "running"),
                phase=state.phase,
                step=state.step,
                silent_s=_silence(state),
                stack=_added(path, before) if path else "",
                last_collective=f"{last.seq}: {last.text()}" if last else "",
                path=str(path or ""),
            )
        )
    watch.close()
    return found


def _silence(state: RankState) -> float:
    said = state.spoke_mono
    return round(max(0.0, time.monotonic() - said), 3) if said is not None else 0.0


def _added(path: Path, before: dict[Path, int]) -> str:
    """What was appended to a stack file since then."""
    start = before.get(path, 0)
    data = path.read_bytes()
    return (data[start:] if len(data) > start else data).decode("utf-8", "replace")


def _token(run_dir: Path) -> str:
    """The token in the first heartbeat of the first rank that has one; an empty text if none."""
    for path in heartbeat_files(run_dir).values():
        with path.open("rb") as stream:
            line = stream.readline(1 << 20)
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("token"), str):
            return str(record["token"])
    return ""
