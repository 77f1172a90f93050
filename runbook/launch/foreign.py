"""A launch of a trainer of one's own: what lives, how far it is, and what its end means.

It writes no heartbeats that we know, so its life shows in its log, its console and its processes.
When each row came is written down here: that clock is the only one that its rates rest on.
"""

from __future__ import annotations

import csv
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from nsa.contract import Phase
from runbook.folder import ARRIVALS_CSV, CONSOLE_LOG, OWN_FOLDER, PROCESSES_CSV
from runbook.folder.launch import LineTail, own_log
from runbook.launch.end import (
    killed_for_memory,
    last_error,
    said_by_machine,
    signal_name,
    told_by_parent,
    without_others,
)
from runbook.launch.watch import RankWatch
from runbook.launch.watch.live_status import held_mib
from runbook.launch.watch.rank_state import RankState
from runbook.process import carriers, variables_of
from runbook.records import End, Kind, Launch, LaunchStatus
from runbook.records.own_trainer import OUT, OwnTrainer

# How often processes are looked for and their memory is read; the first readings while it trains
# come faster, so that a short launch has enough of them.
_FIND_EVERY_S, _READ_EVERY_S, _FAST_READINGS = 0.5, 0.1, 100
_OUT_OF_MEMORY = re.compile(
    r"CUDA out of memory|torch\.(cuda\.)?OutOfMemoryError|DefaultCPUAllocator"
)
# A thread that ends while it destroys something: what C++ says of one that wants Python then.
TERMINATED = "terminate called without an active exception"


class ForeignWatch(RankWatch):
    """Follows the log, the console and the processes of such a launch; nothing here judges.

    There is one state, of the whole launch, or one for each rank that writes heartbeats of its own.
    """

    def __init__(self, run_dir: Path, token: str, started_at: float, launch: Launch) -> None:
        super().__init__(run_dir, token, started_at)
        assert launch.own is not None  # noqa: S101 - by its kind
        self._own: OwnTrainer = launch.own
        self._steps = launch.steps
        (run_dir / OWN_FOLDER).mkdir(exist_ok=True)
        self._log: LineTail | None = None
        self._console = _tail(run_dir / CONSOLE_LOG)
        self._reader, self._rows, self._read_again = own_log.RowReader(self._own.log), 0, 0
        self._ready = re.compile(self._own.ready) if self._own.ready else None
        self._found_at = self._read_at = -_FIND_EVERY_S
        self._readings = 0  # while it trained
        self._known: dict[int, int] = {}  # ranks of processes
        self._arrivals = run_dir / ARRIVALS_CSV
        self._processes = run_dir / PROCESSES_CSV
        self._arrived_at = started_at
        _write(self._arrivals, own_log.ARRIVALS.columns)
        _write(self._processes, own_log.PROCESSES.columns)
        _write(self._arrivals, (0, started_at, time.time() - (time.monotonic() - started_at)))
        beats = {r: own_log.heartbeat_path(run_dir, self._own, r) for r in range(launch.voices)}
        self._beats = {rank: _tail(path) for rank, path in beats.items() if path is not None}
        for rank in beats:
            self.ranks[rank] = RankState(
                rank=rank,
                path=self._arrivals,
                for_all=launch.voices != launch.nproc,
                changed_at=started_at,
                phase_since=started_at,
                phase=Phase.INIT if self._ready else Phase.FIRST_STEP,
            )

    def update(self) -> None:
        """Read what has been written since the last call."""
        spoken, ready = list(self._console.lines()), self._ready
        if ready and any(ready.search(line.decode("utf-8", "replace")) for line in spoken):
            self._ready = None
            for state in self.ranks.values():
                self._move(state, Phase.FIRST_STEP)
        step, grown = self._read_log()
        if self._own.heartbeats is None:
            (state,) = self.ranks.values()
            if step is not None:
                self._go_on(state, step)
            if grown or spoken:
                state.arrived(time.monotonic())
        else:
            self._read_beats()
        self._count(time.monotonic())

    def _read_log(self) -> tuple[int | None, bool]:
        """The newest step in the log, and whether the log grew at all."""
        if self._log is None:
            path = own_log.log_path(self.run_dir, self._own.log)
            if path is None:
                return None, False
            self._log = _tail(path)
        lines = list(self._log.lines())
        if self._log.anew > self._read_again:
            # Written anew, as some loggers do for another column: read from its beginning.
            self._read_again = self._log.anew
            self._reader, self._rows = own_log.RowReader(self._own.log), 0
        rows = self._reader.take_all(lines)
        if not rows:
            return None, bool(lines)
        self._rows += len(rows)
        self._note_arrival(self._log.changed_at)
        return int(rows[-1]["step"]), True

    def _note_arrival(self, changed_at: float | None) -> None:
        """When the file was changed, which may be a tenth of a second before it was read."""
        now, wall = time.monotonic(), time.time()
        late = min(max(wall - (changed_at or wall), 0.0), now - self._arrived_at)
        at = max(now - late, self._arrived_at + 1e-6)
        self._arrived_at = at
        _write(self._arrivals, (self._rows, f"{at:.6f}", f"{wall - late:.6f}"))

    def _read_beats(self) -> None:
        for rank, tail in self._beats.items():
            lines = list(tail.lines())
            steps = [
                s for line in lines if (s := own_log.heartbeat_step(line, self._own)) is not None
            ]
            if steps:
                self._go_on(self.ranks[rank], steps[-1])
            if lines:
                self.ranks[rank].arrived(time.monotonic())

    def _go_on(self, state: RankState, step: int) -> None:
        now = time.monotonic()
        if state.phase == Phase.STEP:
            state.longest_step_s = max(state.longest_step_s, now - state.changed_at)
        state.step = step
        # What comes after the last step (an evaluation, a file) may take as long as a checkpoint.
        self._move(state, Phase.CHECKPOINT if step >= self._steps else Phase.STEP)

    def _move(self, state: RankState, phase: Phase) -> None:
        if state.phase != phase:
            state.phase, state.phase_since = phase, time.monotonic()
        state.changed_at = time.monotonic()

    def _count(self, now: float) -> None:
        """Write down every process of the launch, its rank if its environment tells, its memory."""
        step = self.ranks[0].step
        fast = step > 0 and self._readings < _FAST_READINGS
        if now < self._read_at + (_READ_EVERY_S if fast else _FIND_EVERY_S):
            return
        self._read_at = now
        self._readings += step > 0
        if now >= self._found_at + _FIND_EVERY_S:
            self._found_at = now
            self._known = {pid: _rank_of(pid) for pid in carriers(self.token)}
            for pid, rank in self._known.items():
                if rank in self.ranks:
                    self.ranks[rank].pid = pid
        for pid, rank in self._known.items():
            held = held_mib(pid)
            if held is not None:
                _write(self._processes, (f"{now:.3f}", step, pid, rank, f"{held:.1f}"))

    def hang(self, found: End, ranks: Sequence[RankState]) -> End:
        """A hang in words that blame no rank, where none told of itself."""
        if self._own.heartbeats is not None:
            return found
        (state,) = ranks
        age = time.monotonic() - state.changed_at
        where = f"at step {state.step}" if state.step > 0 else "before its first row"
        cause = f"hang: neither its log nor its console grew for {age:.1f} s {where}"
        if state.for_all:
            cause += "; one rank writes for all, so which one hangs is not known"
        return replace(found, cause=cause)


def _tail(path: Path) -> LineTail:
    """Follows a file of a trainer that is not ours; a progress bar ends its lines otherwise."""
    return LineTail(path, replaced=True, ends=b"\n\r")


def _write(path: Path, cells: Sequence[object]) -> None:
    with path.open("a", encoding="utf-8", newline="") as stream:
        csv.writer(stream, lineterminator="\n").writerow(cells)


def _rank_of(pid: int) -> int:
    """The rank in a process's environment; -1 if it tells none."""
    told = dict(one.partition(b"=")[::2] for one in variables_of(pid))
    text = told.get(b"RANK", told.get(b"LOCAL_RANK", b""))
    return int(text) if text.isdigit() else -1


def own_words(words: Sequence[str], folder: str) -> list[str]:
    """The words of its command with the folder that is new in each launch."""
    return [word.replace(OUT, folder) for word in words]


def classify_foreign(
    child_code: int | None,
    *,
    oom: tuple[int | None, int | None],
    console: Sequence[str],
    step: int,
    steps: int,
) -> End:
    """The end of such a launch by its exit code and its console: completed only with 0.

    `step` is the last one of `steps` that its log told, 0 if it told none.
    """
    if child_code == 0:
        return End(status=LaunchStatus.COMPLETED)
    told = told_by_parent(console)
    culprit, code = next(iter(told.items()), (None, child_code))
    who = "the trainer" if culprit is None else f"rank {culprit}"
    word = last_error(without_others(console, culprit))
    name = signal_name(code)
    killed = killed_for_memory(name, oom)
    if killed or any(_OUT_OF_MEMORY.search(line) for line in console):
        cause = f"{who}: {killed}" if killed else f"{who} ran out of memory: {word}"
        return End(status=LaunchStatus.OUT_OF_MEMORY, cause=cause, culprit_rank=culprit)
    # Some count their steps from 0; telling of an abort so late may itself end in another signal.
    if name and step >= steps - 1 and any(TERMINATED in line for line in console):
        cause = f"{who} was ended by {name} while Python ended, after its last step: {TERMINATED}"
        return End(
            status=LaunchStatus.CRASHED, cause=cause, culprit_rank=culprit, kind=Kind.AT_EXIT
        )
    said = "" if step else said_by_machine(console)
    if said:
        return End(status=LaunchStatus.ENVIRONMENT_ERROR, cause=said, culprit_rank=culprit)
    how = f"was ended by {name}" if name else f"ended with exit code {code}"
    cause = f"{who} {how}" + (f": {word}" if word else "")
    return End(status=LaunchStatus.CRASHED, cause=cause, culprit_rank=culprit)
