"""A running command, watched until it ends by itself or has to be ended."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from nsa.contract import HALT_FILE, ExitCode
from runbook.files import write_atomic
from runbook.launch.foreign import ForeignWatch
from runbook.launch.incident import collect_stacks, name_culprit, write_summary
from runbook.launch.launcher_api import Launcher, Running
from runbook.launch.local import Local
from runbook.launch.observer import Observer, StopRequest
from runbook.launch.watch import RankWatch
from runbook.launch.watch.live_status import LiveStatus, pulse_of
from runbook.launch.watch.watchdog import Budgets, Watchdog
from runbook.machine.surroundings import free_bytes
from runbook.records import Begun, End, Launch, LaunchStatus, RankExit, Stopped

_POLL_S = 0.1
_TERM_GRACE_S = 2.0
# After one rank has failed, what the others and torchrun may still take before they are ended.
_FAILED_GRACE_S = 1.0
_AGREED_CODES = (ExitCode.SUCCESS, ExitCode.HALTED, ExitCode.NONFINITE, ExitCode.PREEMPTED)


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """How a launch is run, below the folder `run_root`.

    `machine` is the environment of the harness. `enough` is asked with the path of training.csv
    after each round of a schedule. `budgets` are the launch's own unless given.
    `launcher` is where it runs, this machine by default. `begun` is the checkpoint that a launch
    which resumes another one goes on from; without it, the trainer takes the newest one. `retry`:
    a stall or a failure of the collective library is tried once more.
    """

    run_root: Path
    observer: Observer
    machine: Mapping[str, str] = field(default_factory=lambda: os.environ)
    stop: StopRequest = field(default_factory=StopRequest)
    budgets: Budgets | None = None
    enough: Callable[[Path], bool] | None = None
    launcher: Launcher = field(default_factory=Local)
    begun: Begun | None = None
    retry: bool = True


class Supervision:
    """Watches the command of one attempt, which is to do so many `steps`.

    Afterwards `ended_with` is how it ended by itself, `stopped` when it was told to end as planned,
    `least_free` the least room seen on its disk (bytes), and there may be `evidence` and `notes`.
    """

    place: Running
    watch: RankWatch

    def __init__(self, launch: Launch, options: LaunchOptions, *, steps: int) -> None:
        self.launch, self.options = launch, options
        self.run_dir = options.run_root / launch.run_dir
        self.budgets = options.budgets or Budgets.for_launch(launch)
        self.watchdog = Watchdog(self.budgets, wanted=launch.voices)
        self.live_status = LiveStatus(
            launch,
            self.run_dir,
            steps=steps,
            observer=options.observer,
            enough=options.enough,
        )
        self.evidence: list[Path] = []
        self.notes: list[str] = []
        self.least_free = free_bytes(options.run_root)
        self.ended_with: int | None = None  # stays None if the command is ended from here
        self.stopped: Stopped | None = None
        self._failed_at: float | None = None

    def until_end(self, place: Running) -> End | None:
        """Watch it. Returns None if it ended by itself, else why it is being ended."""
        self.place, self.watch = place, place.watch
        while True:
            before_s = self.watch.presence.away_s
            self.place.wait(_POLL_S)
            self._back_after(self.watch.presence.away_s - before_s)
            self.live_status.tell_step(self.watch.ranks)
            self.least_free = min(self.least_free, free_bytes(self.run_dir))
            self.ended_with = self.place.poll()
            if self.ended_with is not None:
                return None
            if self.options.stop.requested:
                return self._interrupted()
            end = self._lost() or self._overdue(time.monotonic())
            if end is not None:
                return end
            if self._has_failed(time.monotonic()):
                return self.place.trouble(suspected=True) or self._stuck_at_exit()
            self._stop_as_planned()
            self.live_status.look(self.watch.ranks, now=time.monotonic())

    def _back_after(self, away_s: float) -> None:
        """Give a launch the time again in which this process did not run."""
        if not away_s:
            return
        self._failed_at = None if self._failed_at is None else self._failed_at + away_s
        said = f"the harness itself stood still for {away_s:.0f} s: stopped, or with its container"
        self.notes.append(said)
        self.options.observer.note(f"{self.launch.name}: {said}")

    def _stop_as_planned(self) -> None:
        """Tell it to end, once, when every rank has done the steps after which the plan does."""
        planned, ranks = self.launch.stop, self.watch.ranks
        if planned is None or self.stopped is not None or len(ranks) < self.launch.nproc:
            return
        if any(state.steps_ended < planned.steps for state in ranks.values()):
            return
        last = ranks[max(ranks)]
        if planned.by == HALT_FILE:
            write_atomic(self.run_dir / HALT_FILE, f"planned, after {planned.steps} steps\n")
        elif not self.place.send(last, signal.SIGTERM):
            return
        mono = None if last.elsewhere else time.monotonic()
        step = max(state.last_step or 0 for state in ranks.values())
        self.stopped = Stopped(step=step, mono=mono)
        self.options.observer.note(f"{self.launch.name}: {planned.by} at step {step}, as planned")

    def as_planned(self, end: End, exits: Sequence[RankExit]) -> End:
        """The end; a good one where it was told to end, and every rank ended so."""
        planned = self.launch.stop
        if planned is None or self.stopped is None or len(exits) != self.launch.nproc:
            return end
        agreed = all(rank.code == planned.code for rank in exits)
        return End(status=LaunchStatus.COMPLETED) if agreed else end

    def _lost(self) -> End | None:
        """The place itself failed: its ranks are not to blame."""
        end = self.place.trouble()
        return self._incident(end) if end is not None and self.watch.ranks else end

    def _overdue(self, now: float) -> End | None:
        ranks = list(self.watch.ranks.values())
        if self.place.began is None:
            return None
        lasted_s = now - self.place.began - self.watch.presence.away_s
        if lasted_s > self.launch.timeout_s:
            cause = f"timed out after {self.launch.timeout_s:g} s"
            return self._incident(End(status=LaunchStatus.TIMED_OUT, cause=cause))
        if not self.launch.voices or any(s.ended and s.exit_code != 0 for s in ranks):
            return None  # the peers of a failed rank wait for it; that is no hang of theirs
        if self.watchdog.find_hang(ranks, now=now) is not None:
            if (lost := self.place.trouble(suspected=True)) is not None:
                return lost
            hang, stacks = name_culprit(self.watchdog, self.watch, self.place.send)
            if isinstance(self.watch, ForeignWatch):
                hang = self.watch.hang(hang, ranks)
            if self.launch.voices != self.launch.nproc:
                hang = replace(hang, culprit_rank=None)  # one voice speaks for all of them
            return self._incident(hang, stacks)
        if len(ranks) < self.launch.voices and lasted_s > self.budgets.silence_s:
            return self._silent()
        return None

    def _silent(self) -> End:
        missing = sorted(set(range(self.launch.nproc)) - set(self.watch.ranks))
        cause = f"silent: no heartbeat of ranks {missing} within {self.budgets.silence_s:g} s"
        culprit = missing[0] if len(missing) == 1 else None
        return self._incident(End(status=LaunchStatus.SILENT, cause=cause, culprit_rank=culprit))

    def _incident(self, end: End, stacks: list[Path] | None = None) -> End:
        """Keep the evidence of a launch that has to be ended."""
        if stacks is None:
            ranks = list(self.watch.ranks.values())
            stacks = collect_stacks(self.run_dir, ranks, self.place.send)
        self.options.observer.note(f"{self.launch.name}: {end.cause}")
        self.evidence += [*stacks, write_summary(self.watch, end.cause)]
        return end

    def _has_failed(self, now: float) -> bool:
        """True once a rank has ended badly and the rest has had its time to end as well."""
        ended = [state for state in self.watch.ranks.values() if state.ended]
        if not ended:
            return False
        if self._failed_at is None:
            if all(state.exit_code == 0 for state in ended) and len(ended) < self.launch.nproc:
                return False  # the watchdog sees to those that go on
            self._failed_at = now
        agreed = all(state.exit_code in _AGREED_CODES for state in ended)
        grace = self.budgets.exit_s if agreed else _FAILED_GRACE_S
        return now - self._failed_at > grace

    def _stuck_at_exit(self) -> End | None:
        """None if a rank failed; a hang if all were done and the command still does not end."""
        states = list(self.watch.ranks.values())
        if any(state.exit_code != 0 for state in states):
            return None
        waited = f"{self.budgets.exit_s:g} s"
        cause = f"hang at exit: every rank was done, but the command did not end within {waited}"
        return self._incident(End(status=LaunchStatus.HUNG, cause=cause))

    def _interrupted(self) -> End:
        """Ask the ranks to end (never torchrun, which would pass a second signal on)."""
        cause = f"interrupted by {self.options.stop.requested}"
        ranks = list(self.watch.ranks.values())
        quiet = pulse_of(ranks, wanted=self.launch.nproc, now=time.monotonic()).silent
        if quiet and not self.launch.own:
            # Whoever lost patience before it was called a hang is told where it stood.
            silent = f"rank {quiet[0].rank} had been silent for {quiet[0].silent_s:.0f} s"
            cause = f"{cause} while {silent}"
            self.evidence += collect_stacks(self.run_dir, ranks, self.place.send)
        for state in ranks:
            if not state.ended:
                self.place.send(state, signal.SIGTERM)
        deadline = time.monotonic() + (_TERM_GRACE_S if self.watch.ranks else 0.0)
        while time.monotonic() < deadline and self.place.poll() is None:
            time.sleep(0.05)
            self.watch.update()
        return End(status=LaunchStatus.INTERRUPTED, cause=cause)
