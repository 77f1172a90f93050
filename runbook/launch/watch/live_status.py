"""What is seen and told of a launch while it runs: its step, its pulse, its numbers, its memory.

This ends nothing: what is a hang, the watchdog decides by its budgets.
"""

from __future__ import annotations

import csv
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from nsa.contract import CHECKPOINTS_DIR, ENOUGH_FILE, TRAINING_CSV, VAL_CSV, Event
from runbook.files import text_there
from runbook.folder import RESOURCES_CSV
from runbook.folder.launch import TableTail
from runbook.folder.launch.documents import RESOURCES
from runbook.launch.observer import Observer, Pulse, SilentRank
from runbook.launch.watch.detectors import Monitor, step_of
from runbook.launch.watch.rank_state import RankState
from runbook.launch.watch.watchdog import SLOW_PHASES, STOPPED, Thresholds, blame
from runbook.records import Launch

_SHM = Path("/dev/shm")  # noqa: S108 - what is there is counted, nothing is written
_BLOCK_BYTES, _MIB = 512, 1 << 20
# Of resident memory what belongs to no file: its own, and that of /dev/shm.
_HELD = ("RssAnon:", "RssShmem:")


class ResourceLog:
    """Appends a row for each rank of this machine to `resources.csv` in the launch's folder.

    Resident MiB, descriptors, threads and children are the rank's own. The MiB in /dev/shm are
    those of this user's files that changed since the launch began; the MiB of the folder are
    without checkpoints, which a profile asks for. A rank on another machine has no row.
    """

    def __init__(self, run_dir: Path) -> None:
        self._folder, self._began = run_dir, time.time()
        self._path = run_dir / RESOURCES_CSV

    def look(self, ranks: Iterable[RankState]) -> None:
        """Note what each rank that lives holds now. Raises OSError where the disk refuses."""
        held = [
            (state, counts)
            for state in ranks
            if state.handle is not None and (counts := _held_by(state.pid or 0))
        ]
        if not held:
            return
        now, begins = f"{time.monotonic():.3f}", not self._path.exists()
        # In /dev/shm what this launch may have made.
        mine, began = os.getuid(), self._began
        made = (one for one in _files(_SHM) if one.st_uid == mine and one.st_ctime >= began)
        shared = (
            f"{_mib(made):.1f}",
            f"{_mib(_files(self._folder)):.1f}",
            f"{shutil.disk_usage(self._folder).free / _MIB:.0f}",
        )
        with self._path.open("a", encoding="utf-8", newline="") as stream:
            rows = csv.writer(stream, lineterminator="\n")
            if begins:
                rows.writerow(RESOURCES.columns)
            rows.writerows((now, s.step, s.rank, *counts, *shared) for s, counts in held)


def _held_by(pid: int) -> tuple[str, int, int, int] | None:
    """Resident MiB, descriptors, threads, children of a process; None if gone or not ours."""
    try:
        process = psutil.Process(pid)
        descriptors, threads = process.num_fds(), list(Path(f"/proc/{pid}/task").iterdir())
        resident = process.memory_info().rss / _MIB
    except (psutil.Error, OSError):
        return None
    # A process that ends has given its descriptors back already.
    if not descriptors or not resident:
        return None
    return f"{resident:.1f}", descriptors, len(threads), _children(threads)


def held_mib(pid: int) -> float | None:
    """Resident memory of a process without the pages of files that it has mapped, MiB: the kernel
    takes those back at need, and a reader of a large file has ever more of them. None if it is
    gone, or has ended and holds none.
    """
    words = text_there(Path(f"/proc/{pid}/status")).split()
    held = [int(words[words.index(name) + 1]) for name in _HELD if name in words]
    return sum(held) / 1024 or None


def _children(threads: Iterable[Path]) -> int:
    count = 0
    for thread in threads:
        with suppress(FileNotFoundError):  # it has ended meanwhile, or the kernel does not tell
            count += len((thread / "children").read_bytes().split())
    return count


def _files(folder: Path) -> Iterator[os.stat_result]:
    """The files below a folder as far as they can be looked at, without checkpoints."""
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != CHECKPOINTS_DIR]
        for name in names:
            with suppress(OSError):  # gone meanwhile
                yield Path(place, name).lstat()


def _mib(files: Iterable[os.stat_result]) -> float:
    return sum(one.st_blocks for one in files) * _BLOCK_BYTES / _MIB


_EVERY_S = 0.5
# Which heartbeat tells that a row of a file was written.
_TOLD_BY = {TRAINING_CSV: Event.PROGRESS, VAL_CSV: Event.EVAL}


class LateRows:
    """Rows that rank 0 says it has written, and that are not in their file yet.

    A row comes before the heartbeat that tells of it. So whoever reads the heartbeat first and the
    file then finds the row there, however busy the machine is; a trainer that keeps its rows in
    memory loses them when it is killed. `look` is called after its heartbeats were read.
    """

    def __init__(self, run_dir: Path) -> None:
        self._tails = {name: TableTail(run_dir / name) for name in _TOLD_BY}
        self._newest = dict.fromkeys(_TOLD_BY, 0.0)

    def look(self, rank: RankState) -> None:
        """Note in the rank's state how many steps each file is behind, where it is.

        Files of another machine come late by themselves, so of a rank there nothing is noted.
        """
        if rank.elsewhere:
            return
        for name, tail in self._tails.items():
            told = rank.latest.get(_TOLD_BY[name], {}).get("step")
            for row in tail.rows():
                if (step := step_of(row)) < math.inf:
                    self._newest[name] = max(self._newest[name], step)
            if isinstance(told, int) and told > self._newest[name]:
                behind = told - int(self._newest[name])
                rank.late_rows[name] = max(rank.late_rows.get(name, 0), behind)


class LiveStatus:
    """Looks at one attempt of a launch from its run directory; decides nothing about its end.

    `notes`: every anomaly of its numbers, in a line of its own. `steps`: how many it will do.
    A launch that is watched has detectors of its numbers. `enough` is asked with the path of
    training.csv after each round of a schedule; a yes is passed on to the trainer.
    """

    def __init__(
        self,
        launch: Launch,
        run_dir: Path,
        *,
        steps: int,
        observer: Observer,
        enough: Callable[[Path], bool] | None,
    ) -> None:
        self.launch, self.run_dir, self.steps = launch, run_dir, steps
        self.observer, self.enough = observer, enough
        limits = Thresholds.from_variables(launch.env) if launch.watched else None
        self.monitor = Monitor(run_dir, limits) if limits else None
        looks = launch.watched and launch.has_ranks
        self.resources = ResourceLog(run_dir) if looks else None
        self._late_rows = LateRows(run_dir)
        self.notes: list[str] = []
        self._reported_step = -1
        self._looked_at, self._blocks_seen = 0.0, 0

    def tell_step(self, ranks: Mapping[int, RankState]) -> None:
        """The first rank's step, and what its tables lack, where it is another one than before."""
        first = ranks.get(0)
        if first is not None and first.step != self._reported_step:
            self._reported_step = first.step
            self._late_rows.look(first)
            self.observer.launch_progress(self.launch, first.step, self.steps, first.toks_per_s)

    def look(self, ranks: Mapping[int, RankState], *, now: float) -> None:
        """Twice a second: the pulse, the numbers, what is held; after a block, is it enough?"""
        if now < self._looked_at + _EVERY_S:
            return
        self._looked_at = now
        # One voice of several ranks tells nothing of how many are alive.
        wanted = self.launch.voices if self.launch.voices == self.launch.nproc else 0
        pulse = pulse_of(list(ranks.values()), wanted=wanted, now=now)
        self.observer.launch_ranks(self.launch, pulse)
        self.watch_numbers()
        if self.resources is not None:
            self.resources.look(ranks.values())
        self._ask_whether_enough(ranks)

    def watch_numbers(self) -> None:
        """Note what the numbers that were written since the last time say."""
        for anomaly in self.monitor.look_and_record() if self.monitor else ():
            self.notes.append(anomaly.line())
            self.observer.note(f"{self.launch.name}: {anomaly.line()}")

    def _ask_whether_enough(self, ranks: Mapping[int, RankState]) -> None:
        schedule = self.launch.schedule
        if self.enough is None or schedule is None:
            return
        first = ranks.get(0)
        per_round = (schedule.steps + schedule.warmup_steps) * max(map(len, schedule.rounds))
        blocks = first.step // per_round if first else 0
        if blocks > self._blocks_seen:
            self._blocks_seen = blocks
            if self.enough(self.run_dir / TRAINING_CSV):
                (self.run_dir / ENOUGH_FILE).touch()


# Silence is worth a word from this many of a rank's usual pauses on, and never before LEAST_S: the
# files are looked at ten times a second, and a busy machine is late by itself.
_TIMES_USUAL = 3.0
_LEAST_S = 2.0
# A rank that was heard too seldom to have a usual pause.
_UNKNOWN_S = 10.0


def pulse_of(ranks: Sequence[RankState], *, wanted: int, now: float) -> Pulse:
    """The pulse at `now`, on the clock of `RankState.changed_at`.

    Nobody is silent while a rank is in something that may take long: the others wait for it.
    """
    alive = [state for state in ranks if not state.ended]
    slow = [state for state in alive if state.phase in SLOW_PHASES]
    if slow:
        longest = min(slow, key=lambda state: state.phase_since)
        since = now - longest.phase_since
        return Pulse(alive=len(alive), wanted=wanted, busy=longest.phase, busy_s=since)
    quiet = [state for state in alive if _is_silent(state, now)]
    if not quiet:
        return Pulse(alive=len(alive), wanted=wanted)
    first = blame(quiet).rank
    quiet.sort(key=lambda state: (state.rank != first, state.rank))
    silent = tuple(
        SilentRank(
            rank=state.rank,
            silent_s=now - state.changed_at,
            usual_s=state.usual_s,
            state=STOPPED.get(state.process_state, ""),
        )
        for state in quiet
    )
    return Pulse(alive=len(alive), wanted=wanted, silent=silent)


def _is_silent(state: RankState, now: float) -> bool:
    usual = state.usual_s
    limit = _UNKNOWN_S if usual is None else max(_LEAST_S, _TIMES_USUAL * usual)
    return now - state.changed_at > limit
