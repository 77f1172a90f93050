"""Beside a launch that somebody else started: its screen, and the stacks of its live ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from nsa.contract import ENV_JSON, GATES_CSV, STACKDUMPS, TRAINING_CSV, Event, ExitCode
from runbook.files import read_bytes
from runbook.folder import ANOMALIES_JSONL
from runbook.folder.launch import heartbeat_files, heartbeats_in
from runbook.folder.launch.documents import json_object
from runbook.folder.launch.shapes import is_any_number
from runbook.launch.incident import (
    collect_flights,
    collect_stacks,
    name_culprit,
    write_summary,
)
from runbook.launch.incident.flight import read_flights
from runbook.launch.watch import RankWatch
from runbook.launch.watch.detectors import Anomaly, Monitor, record_anomaly
from runbook.launch.watch.live_status import pulse_of
from runbook.launch.watch.rank_state import RankState
from runbook.launch.watch.watchdog import STOPPED, Budgets, Thresholds, Watchdog
from runbook.process import signal_owned
from runbook.records.measurement import TOKENS_PER_SECOND, duration_text


def follow(run_dir: Path) -> RankWatch:
    """A view of the ranks of a directory, by the first token that their heartbeats carry."""
    first = (next(heartbeats_in(path), {}) for path in heartbeat_files(run_dir).values())
    tokens = (beat["token"] for beat in first if isinstance(beat.get("token"), str))
    return RankWatch(run_dir, next(tokens, ""), time.monotonic())


def is_over(run_dir: Path) -> bool:
    ranks = follow(run_dir)
    ranks.update()
    ranks.close()
    return _all_ended(ranks.ranks.values())


def _all_ended(states: Iterable[RankState]) -> bool:
    """Has every rank that left heartbeats said its exit, or died?"""
    ended = [state.ended for state in states]
    return bool(ended) and all(ended)


def _send(token: str, state: RankState, number: int) -> bool:
    """As in `Send`: by the token, or its heartbeat file is open."""
    path = str(state.path)
    return state.pid is not None and signal_owned(state.pid, token, number, path=path)


_READINGS = "losses, gradients, rates and memory"
_GOOD_CODES = (ExitCode.SUCCESS, ExitCode.HALTED, ExitCode.PREEMPTED)


class Screen:
    """Looks at one run directory: its numbers, and whether its ranks still speak.

    Works on any directory with training.csv, gates.csv or heartbeats; `lines` say what is known,
    and what cannot be seen. The age of a heartbeat counts from when it was first seen here, so a
    directory of yesterday is no sudden alarm. Without `limits.halt` it only reads: nothing is
    written into the directory, no rank is signaled.
    """

    def __init__(self, run_dir: Path, limits: Thresholds) -> None:
        self.run_dir, self.limits = run_dir, limits
        self.monitor = Monitor(run_dir, limits)
        self.ranks = follow(run_dir)
        self._budgets = Budgets.with_stall(limits.heartbeat_stall_s)
        self._found: list[Anomaly] = []
        self._blind: set[str] = set()
        self._plan: Mapping[str, Any] = {}

    @property
    def _states(self) -> list[RankState]:
        return [state for _, state in sorted(self.ranks.ranks.items())]

    @property
    def over(self) -> bool:
        """Has every rank said its exit, or died?"""
        return _all_ended(self._states)

    @property
    def trains(self) -> bool:
        """Has a step been told of?"""
        stepped = any(state.step > 0 for state in self._states)
        return stepped or self.monitor.readings.path is not None

    def look(self) -> list[Anomaly]:
        """What is new; where the run is to be halted it is written down, and `.HALT` with it."""
        found = [*self.monitor.look(), *self._speech()]
        for anomaly in found if self.limits.halt else ():
            record_anomaly(self.run_dir, anomaly, halt=True)
        self._found += found
        return found

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
        if not self._states:
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
        states, told = self._states, {(one.kind, one.rank) for one in self._found}
        ended = [_bad_end(one) for one in states if one.ended and one.exit_code not in _GOOD_CODES]
        found = [one for one in ended if (one.kind, one.rank) not in told]
        if found or not states or "heartbeat_stall" in dict(told):
            return found
        watchdog = Watchdog(self._budgets, wanted=len(states))
        hang = watchdog.find_hang(states, now=time.monotonic())
        if hang is None:
            return []
        if self.limits.halt:  # a stall gets a stack dump before anything else
            hang, _ = name_culprit(watchdog, self.ranks, partial(_send, self.ranks.token))
            write_summary(self.ranks, hang.cause)
        return [Anomaly(kind="heartbeat_stall", text=hang.cause, rank=hang.culprit_rank)]

    def lines(self) -> list[str]:
        """The whole screen, from the run's state down to each rank."""
        states = self._states
        first = states[0] if states else None
        return [
            f"{self.run_dir}  {self._state(states)}",
            *([self._numbers(first)] if first is not None else []),
            *(_rank_line(state) for state in states),
            self._checkpoint(first),
            self._incidents(),
            *(f"not seen: {line}" for line in self._unseen(states)),
        ]

    def status(self) -> str:
        """One line of it, for a log."""
        states = self._states
        numbers = [self._numbers(states[0])] if states else []
        return "  ".join([self._state(states), *numbers, self._incidents()])

    def _state(self, states: Sequence[RankState]) -> str:
        if not states:
            return "no heartbeats"
        step, total = min(state.step for state in states), self._number("steps")
        done = f"step {step}" + (f"/{total:.0f}, {100 * step / total:.0f} %" if total else "")
        ends = [state for state in states if state.exit_code is not None]
        bad = [state for state in ends if state.exit_code != ExitCode.SUCCESS]
        dead = [state for state in states if state.ended and state.exit_code is None]
        if dead:
            ranks = ", ".join(str(state.rank) for state in dead)
            return f"rank {ranks} is gone without a word at {done}"
        if len(ends) == len(states):
            end = (bad or ends)[0]
            return f"ended at {done}: {end.exit_reason or 'no reason'} (code {end.exit_code})"
        return f"{done}{self._left(states[0], step, total)}"

    def _left(self, state: RankState, step: int, total: float | None) -> str:
        tokens = self._number("tokens_per_step")
        if not total or not tokens or not state.rates or self._silent(state):
            return ""
        seconds = (total - step) * tokens / statistics.median(state.rates)
        return f", {duration_text(round(seconds))} left" if seconds > 0 else ""

    def _numbers(self, state: RankState) -> str:
        told, evaluated = (state.latest.get(one, {}) for one in (Event.PROGRESS, Event.EVAL))
        loss, parts = told.get("loss"), []
        if is_any_number(loss) or isinstance(loss, str):
            parts.append(f"loss {loss}" if isinstance(loss, str) else f"loss {loss:.4f}")
        if is_any_number(evaluated.get("loss")):
            parts.append(f"validation {evaluated['loss']:.4f} (step {evaluated.get('step')})")
        if is_any_number(told.get("grad_norm")):
            parts.append(f"gradient norm {told['grad_norm']:.3g}")
        # The last rate of a run that has fallen silent is not its rate.
        if state.rates and not state.ended and not self._silent(state):
            parts.append(f"{statistics.median(state.rates):,.0f} {TOKENS_PER_SECOND}")
        return "  ".join(parts) or "no step has been told yet"

    def _silent(self, state: RankState) -> bool:
        ranks = self._states
        pulse = pulse_of(ranks, wanted=len(ranks), now=time.monotonic())
        return any(one.rank == state.rank for one in pulse.silent)

    def _checkpoint(self, state: RankState | None) -> str:
        record = state.latest.get(Event.CHECKPOINT) if state is not None else None
        if record is None:
            every = self._plan.get("config", {}).get("train", {}).get("save_every")
            return "checkpoint  none yet" + (f", one every {every} steps" if every else "")
        took = [f"{_seconds(record.get('seconds'))} to write"]
        if is_any_number(record.get("held_up_s")):
            took.append(f"training held up {_seconds(record['held_up_s'])}")
        name = Path(str(record.get("path"))).name
        return f"checkpoint  {name}, {_age(record.get('ts'))} old ({', '.join(took)})"

    def _incidents(self) -> str:
        file = self.run_dir / ANOMALIES_JSONL
        rows = heartbeats_in(file) if file.is_file() else ()
        earlier = [f"{row.get('kind')}: {row.get('text')}" for row in rows]
        texts = list(dict.fromkeys([*earlier, *(one.line() for one in self._found)]))
        return f"incidents  {len(texts)}" + (f", last: {texts[-1]}" if texts else "")

    def _unseen(self, states: Sequence[RankState]) -> Iterator[str]:
        if not self._plan:
            yield f"how long the run is (no {ENV_JSON} yet)"
        if any(_memory(state)[1] for state in states):
            yield "use of the GPUs (nvidia-smi shows it)"

    def _number(self, name: str) -> float | None:
        if not self._plan:
            self._plan = json_object(self.run_dir / ENV_JSON)
        value = self._plan.get("effective", {}).get(name)
        return float(value) if is_any_number(value) else None


def _bad_end(state: RankState) -> Anomaly:
    gone = f"its process is gone at step {state.step}, without an exit heartbeat"
    text = f"rank {state.rank} ended: {state.exit_reason or gone}"
    return Anomaly(kind="rank_ended", text=text, rank=state.rank, step=state.step)


def _rank_line(state: RankState) -> str:
    if state.exit_code is not None:
        now = f"ended with code {state.exit_code}"
    elif state.ended:
        now = "gone"
    else:
        now = f"{state.phase}, heard {_age(state.ts)} ago"
    host, device = _memory(state)
    memory = "  ".join(
        f"{what} {value:,.0f} MiB" for what, value in (("host", host), ("GPU", device)) if value
    )
    return f"rank {state.rank}  step {state.step}  {now}  {memory}".rstrip()


def _memory(state: RankState) -> tuple[float, float]:
    """MiB on the host and, at its peak, on the device; 0 where nothing is told."""
    told = state.recent[-1] if state.recent else {}
    step = state.latest.get(Event.STEP_END, {})
    host, device, peak = told.get("rss_mib"), told.get("cuda_mib"), step.get("reserved_mib")
    if is_any_number(device) and is_any_number(peak):
        device = peak
    return _or_zero(host), _or_zero(device)


def _or_zero(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _age(ts: object) -> str:
    """How long ago by the wall clock that the run wrote."""
    if not isinstance(ts, int | float):
        return "?"
    seconds = max(0.0, time.time() - ts)
    return duration_text(round(seconds, 1) if seconds < 10 else round(seconds))


def _seconds(value: object) -> str:
    return duration_text(float(value)) if isinstance(value, int | float) else "? s"


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


def live_stacks(run_dir: Path) -> list[RankStack]:
    """The stacks of every rank that is alive, now.

    The ranks write them (stackdump and flight files in the run directory); a frozen one is read
    from outside where py-spy is installed. Empty if no rank is alive.
    """
    watch = follow(run_dir)
    watch.update()
    ranks = [s for s in watch.ranks.values() if s.handle is not None and s.exit_code is None]
    token = watch.token
    send = partial(_send, token)
    before = {p: p.stat().st_size for p in run_dir.glob(STACKDUMPS.glob())}
    collect_flights(run_dir, ranks, send)
    files = {STACKDUMPS.rank_of(p.name): p for p in collect_stacks(run_dir, ranks, send)}
    flights = read_flights(run_dir, token=token)
    found, now = [], time.monotonic()
    for state in ranks:
        path = files.get(state.rank)
        flight = flights.get(state.rank)
        last = flight[-1] if flight else None
        found.append(
            RankStack(
                rank=state.rank,
                pid=state.pid or 0,
                state=STOPPED.get(state.process_state, "running"),
                phase=state.phase,
                step=state.step,
                silent_s=round(max(0.0, now - (state.mono or now)), 3),
                stack=_added(path, before) if path else "",
                last_collective=f"{last.seq}: {last.what}" if last else "",
                path=str(path or ""),
            )
        )
    watch.close()
    return found


def _added(path: Path, before: dict[Path, int]) -> str:
    """What was appended to a stack file since then."""
    start = before.get(path, 0)
    data = read_bytes(path)
    return (data[start:] if len(data) > start else data).decode("utf-8", "replace")
