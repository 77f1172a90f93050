"""Beside a run that somebody else started: its watchdog, and the stacks of its live ranks."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from nsa.contract import GATES_CSV, STACKDUMPS, TRAINING_CSV, ExitCode
from runbook.files import read_bytes
from runbook.folder.launch import heartbeat_files, heartbeats_in
from runbook.launch.incident import (
    collect_flights,
    collect_stacks,
    name_culprit,
    read_outside,
    write_summary,
)
from runbook.launch.incident.flight import read_flights
from runbook.launch.watch import RankState, RankWatch
from runbook.launch.watch.detectors import Anomaly, Monitor, record_anomaly
from runbook.launch.watch.watchdog import STOPPED, Budgets, Thresholds, Watchdog
from runbook.process import signal_owned


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


@dataclass(frozen=True, kw_only=True)
class Bystander:
    """Reaches a rank whose process is provably it: by the token, or its heartbeat file is open."""

    run_dir: Path
    token: str

    def send(self, state: RankState, number: int) -> bool:
        """As in `Reach`."""
        path = str(state.path)
        return state.pid is not None and signal_owned(state.pid, self.token, number, path=path)

    def read_outside(self, state: RankState) -> Path | None:
        """As in `Reach`."""
        return read_outside(self.run_dir, state)


def live_stacks(run_dir: Path) -> list[RankStack]:
    """The stacks of every rank that is alive, now.

    The ranks write them (stackdump and flight files in the run directory); a frozen one is read
    from outside where py-spy is installed. Empty if no rank is alive.
    """
    watch = follow(run_dir)
    watch.update()
    ranks = [s for s in watch.ranks.values() if s.handle is not None and s.exit_code is None]
    token = watch.token
    reach = Bystander(run_dir=run_dir, token=token)
    before = {p: p.stat().st_size for p in run_dir.glob(STACKDUMPS.glob())}
    collect_flights(run_dir, ranks, reach)
    files = collect_stacks(run_dir, ranks, reach)
    flights = read_flights(run_dir, token=token)
    found = []
    for state in ranks:
        path = next((p for p in files if STACKDUMPS.rank_of(p.name) == state.rank), None)
        flight = flights.get(state.rank)
        last = flight.collectives[-1] if flight and flight.collectives else None
        found.append(
            RankStack(
                rank=state.rank,
                pid=state.pid or 0,
                state=STOPPED.get(state.process_state, "running"),
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
    said = state.mono
    return round(max(0.0, time.monotonic() - said), 3) if said is not None else 0.0


def _added(path: Path, before: dict[Path, int]) -> str:
    """What was appended to a stack file since then."""
    start = before.get(path, 0)
    data = read_bytes(path)
    return (data[start:] if len(data) > start else data).decode("utf-8", "replace")


def _token(run_dir: Path) -> str:
    """The token in the first heartbeat of the first rank that has one; an empty text if none."""
    for path in heartbeat_files(run_dir).values():
        first = next(heartbeats_in(path), {})
        if isinstance(first.get("token"), str):
            return str(first["token"])
    return ""


_READINGS = "losses, gradients, rates and memory"
_GOOD_CODES = (ExitCode.SUCCESS, ExitCode.HALTED, ExitCode.PREEMPTED)


class Watcher:
    """Looks at one run directory: its numbers, and whether its ranks still speak.

    Works on any directory with training.csv, gates.csv or heartbeats. The age of a heartbeat
    counts from when it was first seen here, so a directory of yesterday is no sudden alarm.
    Without `limits.halt` it only reads: nothing is written into the directory, no rank is signaled.
    """

    def __init__(self, run_dir: Path, limits: Thresholds) -> None:
        self.run_dir, self.limits = run_dir, limits
        self.monitor = Monitor(run_dir, limits)
        self.ranks = follow(run_dir)
        self._budgets = Budgets.with_stall(limits.heartbeat_stall_s)
        self._told: set[str] = set()
        self._blind: set[str] = set()

    @property
    def over(self) -> bool:
        """Has every rank said its exit, or died?"""
        states = self.ranks.ranks.values()
        return bool(states) and all(state.ended for state in states)

    def look(self) -> list[Anomaly]:
        """What is new; where the run is to be halted it is written down, and `.HALT` with it."""
        found = [*self.monitor.look(), *self._speech()]
        for anomaly in found if self.limits.halt else ():
            record_anomaly(self.run_dir, anomaly, halt=True)
        return found

    @property
    def trains(self) -> bool:
        """Has a step been told of?"""
        stepped = any(state.step > 0 for state in self.ranks.ranks.values())
        return stepped or self.monitor.readings.path is not None

    def blind_spots(self) -> list[str]:
        """What cannot be watched with the files that are there, as far as not said before."""
        read_from = self.monitor.readings.path
        found = []
        if read_from is None:
            why = f"no row in {TRAINING_CSV}, no progress heartbeat"
            found.append(f"{_READINGS} are not watched: {why}")
        elif read_from.name != TRAINING_CSV:
            found.append(f"no {TRAINING_CSV}: {_READINGS} are read from {read_from.name}")
        if not (self.run_dir / GATES_CSV).exists():
            found.append(f"gates are not watched: no {GATES_CSV}")
        if not self.ranks.ranks:
            found.append("silent and dead ranks and the run's end are not seen: no heartbeats")
        new = [line for line in found if line not in self._blind]
        self._blind.update(new)
        return new

    def _speech(self) -> list[Anomaly]:
        """Silence and bad ends."""
        if not self.ranks.token:
            self.ranks.close()
            self.ranks = follow(self.run_dir)  # the run may have begun since
        self.ranks.wait(0.0)
        states = list(self.ranks.ranks.values())
        found = [a for state in states if (a := self._bad_end(state)) is not None]
        if found or not states or "heartbeat_stall" in self._told:
            return found
        watchdog = Watchdog(self._budgets, wanted=len(states))
        if watchdog.find_hang(states, now=time.monotonic()) is not None:
            self._told.add("heartbeat_stall")
            found.append(self._stall(watchdog, states))
        return found

    def _bad_end(self, state: RankState) -> Anomaly | None:
        name = f"end of rank {state.rank}"
        if not state.ended or state.exit_code in _GOOD_CODES or name in self._told:
            return None
        self._told.add(name)
        how = (
            state.exit_reason
            or f"its process is gone at step {state.step}, without an exit heartbeat"
        )
        text = f"rank {state.rank} ended: {how}"
        return Anomaly(kind="rank_ended", text=text, rank=state.rank, step=state.step)

    def _stall(self, watchdog: Watchdog, states: list[RankState]) -> Anomaly:
        """A stall gets a stack dump before anything else, unless this only reads."""
        if not self.limits.halt:
            hang = watchdog.name_culprit(states, now=time.monotonic())
            return Anomaly(kind="heartbeat_stall", text=hang.cause, rank=hang.culprit_rank)
        token = self.ranks.token
        reach = Bystander(run_dir=self.run_dir, token=token)
        hang, _ = name_culprit(watchdog, self.run_dir, states, reach, token=token)
        write_summary(self.run_dir, states, hang.cause)
        return Anomaly(kind="heartbeat_stall", text=hang.cause, rank=hang.culprit_rank)


def is_over(path: Path) -> bool:
    """Has every rank that left heartbeats there said its exit, or died?"""
    ranks = follow(path)
    ranks.update()
    states = list(ranks.ranks.values())
    ranks.close()
    return bool(states) and all(state.ended for state in states)
