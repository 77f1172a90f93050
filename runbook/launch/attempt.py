"""One attempt of a launch: started, watched, ended, classified, with nothing left alive."""

from __future__ import annotations

import json
import os
import secrets
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nsa.contract import HALT_FILE, ExitCode
from runbook.files import utc_text, write_atomic
from runbook.folder import CONSOLE_LOG, JUNIT_XML, KERNEL_LOG_JSON, LAUNCH_JSON
from runbook.folder.launch.documents import read_console
from runbook.folder.redact import redact_text, redact_variables
from runbook.launch.command import Command
from runbook.launch.end import (
    classify_plain,
    classify_pytest,
    classify_trainer,
    rank_exits,
)
from runbook.launch.foreign import ForeignWatch, classify_foreign
from runbook.launch.incident.bundle import (
    bundle,
    collect_stacks,
    name_culprit,
    stopped_at,
    write_summary,
)
from runbook.launch.inputs import build_environment
from runbook.launch.kernel_cause import with_kernel_log, with_limits
from runbook.launch.launcher_api import Aftermath, Launcher, Running, Start
from runbook.launch.local import Local
from runbook.launch.observer import Observer, StopRequest
from runbook.launch.watch.live_status import LiveStatus
from runbook.launch.watch.ranks import RankWatch
from runbook.launch.watch.watchdog import Budgets, Thresholds, Watchdog
from runbook.machine.surroundings import free_bytes
from runbook.records import Begun, End, Launch, LaunchResult, LaunchStatus, RankExit, Stopped

_POLL_S = 0.1
_TOKEN_BYTES = 16
_TERM_GRACE_S = 2.0
# After one rank has failed, what the others and torchrun may still take before they are ended.
_FAILED_GRACE_S = 1.0
_AGREED_CODES = (ExitCode.SUCCESS, ExitCode.HALTED, ExitCode.NONFINITE, ExitCode.PREEMPTED)


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """How a launch is run, below the folder `run_root`.

    `machine` is the environment of the harness. `enough` is asked with the path of training.csv
    after each round of a schedule. `budgets` and `watch`, which sets the detectors of numbers, are
    the launch's own unless given; it has detectors where the plan says that it is watched.
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
    watch: Thresholds | None = None
    launcher: Launcher = field(default_factory=Local)
    begun: Begun | None = None
    retry: bool = True


class Attempt:
    """Runs one command to its end. `run()` is called once."""

    place: Running

    def __init__(
        self, launch: Launch, command: Command, options: LaunchOptions, number: int
    ) -> None:
        self.launch, self.command, self.options = launch, command, options
        self.number, self.token = number, secrets.token_hex(_TOKEN_BYTES)
        self.run_dir = options.run_root / launch.run_dir
        self.console = self.run_dir / CONSOLE_LOG
        self.started_at = utc_text()
        self.began = time.monotonic()
        self.budgets = options.budgets or Budgets.for_launch(launch)
        self.watchdog = Watchdog(self.budgets, wanted=launch.voices)
        limits = Thresholds.from_variables(launch.env) if launch.watched else None
        self.live_status = LiveStatus(
            launch,
            self.run_dir,
            steps=command.steps,
            observer=options.observer,
            watch=options.watch or limits,
            enough=options.enough,
        )
        self.evidence: list[Path] = []
        self._notes: list[str] = []
        self._console_size, self._console_grew_at = 0, self.began
        self._least_free = free_bytes(options.run_root)
        self._failed_at: float | None = None
        self._ended_at = self.began
        self._ended_with: int | None = None  # stays None if the command is ended from here
        self._stopped: Stopped | None = None

    @classmethod
    def described(
        cls, launch: Launch, document: Mapping[str, Any], options: LaunchOptions
    ) -> Attempt:
        """The attempt of an earlier harness, from its launch.json."""
        steps = int(document["steps"])
        argv = tuple(document["argv"])
        command = Command(argv=argv, env=launch.env, port=None, steps=steps)
        found = cls(launch, command, options, int(document["attempt"]))
        found.token, found.started_at = document["run_token"], document["started_at"]
        then = datetime.fromisoformat(found.started_at)
        found.began -= max(0.0, (datetime.now(UTC) - then).total_seconds())
        return found

    def run(self) -> LaunchResult:
        """Start, watch and end the command; returns when nothing with its token is alive."""
        start = self.start()
        self._describe()
        return self.go_on(self.options.launcher.start(start))

    def start(self) -> Start:
        """What the launcher is given."""
        options, where = self.options, (self.run_dir, self.token, self.began)
        foreign = self.launch.own is not None
        watch = ForeignWatch(*where, self.launch) if foreign else RankWatch(*where)
        environment = build_environment(
            options.machine,
            self.command.env,
            token=self.token,
            run_dir=self.run_dir.resolve(),
            loopback=self.launch.voices > 0 and options.launcher.here,
            folder=self.command.folder,
            own=self.launch.own.env if self.launch.own else (),
            installed=self.command.is_ours,
        )
        return Start(
            launch=self.launch,
            command=self.command,
            environment=environment,
            run_dir=self.run_dir,
            token=self.token,
            watch=watch,
        )

    def go_on(self, place: Running) -> LaunchResult:
        """Watch what was started to its end; returns when nothing with its token is alive."""
        self.place = place
        try:
            end = self._watch_until_end()
        finally:
            place.stop()
        self._ended_at = time.monotonic()
        return self._result(end, place.aftermath(hurry=bool(self.options.stop.requested)))

    @property
    def watch(self) -> RankWatch:
        """The view of the ranks."""
        return self.place.watch

    def _describe(self) -> None:
        document = {
            "schema_version": 1,
            "launch": json.loads(self.launch.model_dump_json()),
            "attempt": self.number,
            "argv": list(self.command.argv),
            "env": redact_variables(self.command.env),
            "port": self.command.port,
            "steps": self.command.steps,
            "begun": self.options.begun.model_dump() if self.options.begun else None,
            "run_token": self.token,
            "started_at": self.started_at,
        }
        document["launch"]["env"] = redact_variables(self.launch.env)
        write_atomic(self.run_dir / LAUNCH_JSON, json.dumps(document, indent=2) + "\n")

    def _watch_until_end(self) -> End | None:
        """Returns None if the command ended by itself, else why it is being ended."""
        while True:
            before_s = self.watch.presence.away_s
            self.place.wait(_POLL_S)
            self._back_after(self.watch.presence.away_s - before_s)
            self.live_status.tell_step(self.watch.ranks)
            self._least_free = min(self._least_free, free_bytes(self.run_dir))
            self._ended_with = self.place.poll()
            if self._ended_with is not None:
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
        self._console_grew_at += away_s
        self._failed_at = None if self._failed_at is None else self._failed_at + away_s
        said = f"the harness itself stood still for {away_s:.0f} s: stopped, or with its container"
        self._notes.append(said)
        self.options.observer.note(f"{self.launch.name}: {said}")

    def _stop_as_planned(self) -> None:
        """Tell it to end, once, when every rank has done the steps after which the plan does."""
        planned, ranks = self.launch.stop, self.watch.ranks
        if planned is None or self._stopped is not None or len(ranks) < self.launch.nproc:
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
        self._stopped = Stopped(step=step, mono=mono)
        self.options.observer.note(f"{self.launch.name}: {planned.by} at step {step}, as planned")

    def _as_planned(self, end: End, exits: tuple[RankExit, ...]) -> End:
        """The end; a good one where it was told to end, and every rank ended so."""
        planned = self.launch.stop
        if planned is None or self._stopped is None or len(exits) != self.launch.nproc:
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
            self._console_grew_at = now
            return None
        if now - self.place.began > self.launch.timeout_s + self.watch.presence.away_s:
            cause = f"timed out after {self.launch.timeout_s:g} s"
            return self._incident(End(status=LaunchStatus.TIMED_OUT, cause=cause))
        if not self.launch.voices or any(s.ended and s.exit_code != 0 for s in ranks):
            return None  # the peers of a failed rank wait for it; that is no hang of theirs
        if self.watchdog.find_hang(ranks, now=now) is not None:
            if (lost := self.place.trouble(suspected=True)) is not None:
                return lost
            hang, stacks = name_culprit(
                self.watchdog,
                self.run_dir,
                ranks,
                self.place,
                token=self.token,
            )
            if isinstance(self.watch, ForeignWatch):
                hang = self.watch.hang(hang, ranks)
            if self.launch.voices != self.launch.nproc:
                hang = replace(hang, culprit_rank=None)  # one voice speaks for all of them
            return self._incident(hang, stacks)
        if len(ranks) < self.launch.voices:
            return self._silent(now)
        return None

    def _silent(self, now: float) -> End | None:
        size = self.place.console_bytes()
        if size != self._console_size:
            self._console_size, self._console_grew_at = size, now
        quiet = now - self._console_grew_at
        if quiet <= self.budgets.silence_s:
            return None
        missing = sorted(set(range(self.launch.nproc)) - set(self.watch.ranks))
        cause = f"silent: nothing printed for {quiet:.0f} s and no heartbeat of ranks {missing}"
        culprit = missing[0] if len(missing) == 1 else None
        return self._incident(End(status=LaunchStatus.SILENT, cause=cause, culprit_rank=culprit))

    def _incident(self, end: End, stacks: list[Path] | None = None) -> End:
        """Keep the evidence of a launch that has to be ended."""
        ranks = list(self.watch.ranks.values())
        if stacks is None:
            stacks = collect_stacks(self.run_dir, ranks, self.place)
        self.options.observer.note(f"{self.launch.name}: {end.cause}")
        self.evidence += [*stacks, write_summary(self.run_dir, ranks, end.cause)]
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
        for state in self.watch.ranks.values():
            if not state.ended:
                self.place.send(state, signal.SIGTERM)
        deadline = time.monotonic() + (_TERM_GRACE_S if self.watch.ranks else 0.0)
        while time.monotonic() < deadline and self.place.poll() is None:
            time.sleep(0.05)
            self.watch.update()
        cause = f"interrupted by {self.options.stop.requested}"
        return End(status=LaunchStatus.INTERRUPTED, cause=cause)

    def _result(self, end: End | None, after: Aftermath) -> LaunchResult:
        self.live_status.watch_numbers()
        lines, _ = read_console(self.console)
        child_code = after.exit_code
        states = [state for _, state in sorted(self.watch.ranks.items())]
        # It waited to begin, or to be found again, where that is not done at once.
        began = self.began if self.options.launcher.here else self.place.began or self.began
        for state in states:
            state.away_s += max(0.0, began - self.began)
        exits: tuple[RankExit, ...] = ()
        notes: tuple[str, ...] = ()
        if self.launch.has_ranks:
            own, wanted = self._ended_with, self.launch.nproc
            exits = rank_exits(states, own, lines)
            end = end or classify_trainer(
                states,
                exits,
                child_code=own,
                wanted=wanted,
                oom=after.oom,
                console=lines,
                where=after.node,
            )
            end = self._as_planned(end, exits)
            end, found, notes = bundle(
                self.run_dir,
                states,
                end,
                token=self.token,
                console=lines,
                load=after.load,
                where=self.place.where,
            )
            self.evidence += [path for path in found if path not in self.evidence]
            pids = {state.pid: state.rank for state in states if state.pid is not None}
            end = with_kernel_log(end, after.kernel, slots=after.slots, pids=pids)
            node = "" if end.culprit_rank is None else self.place.where(end.culprit_rank)
            if node and end.cause:
                cause = f"{end.cause}; rank {end.culprit_rank} ran on node {node}"
                end = replace(end, cause=cause)
            if after.kernel:
                self.evidence.append(self.run_dir / KERNEL_LOG_JSON)
        elif end is None and self.launch.own is not None:
            step = max(state.step for state in states)
            end = classify_foreign(
                self._ended_with, oom=after.oom, console=lines, step=step, steps=self.launch.steps
            )
        elif end is None and self.launch.kind == "collect":
            end = classify_plain(child_code, lines)
        elif end is None:
            junit = (self.run_dir / JUNIT_XML).is_file()
            end = classify_pytest(child_code, junit=junit, console=lines)
        duration_s = round(self._ended_at - self.began, 3)
        end = with_limits(
            end,
            exits,
            child_code=child_code,
            console=lines,
            duration_s=duration_s,
            folder=self.run_dir,
            least_free=self._least_free,
        )
        files = [self.console, *self.evidence] if end.status is not LaunchStatus.COMPLETED else []
        return LaunchResult(
            status=end.status,
            kind=end.kind,
            exit_code=child_code,
            ranks=exits,
            started_at=self.started_at,
            duration_s=duration_s,
            attempts=self.number,
            # It may quote what a trainer said last, and goes into every report.
            cause=redact_text(end.cause),
            culprit_rank=end.culprit_rank,
            evidence=tuple(p.relative_to(self.options.run_root).as_posix() for p in files),
            run_token=self.token,
            steps=self.command.steps,
            notes=(*self._notes, *self.live_status.notes, *notes),
            stopped_at=stopped_at(self.run_dir, end),
            stopped=self._stopped,
        )
