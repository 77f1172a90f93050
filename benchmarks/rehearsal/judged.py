"""A rehearsed machine judged by the real engine. This module alone imports it, and makes nothing.

Collectors, plans, commands, readers, phases, record and report are the program's own. Replaced is
what would need the machine: the start of a process writes the launch's folder instead, and the
sensors for disk and processes tell of the rehearsed machine.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from benchmarks.rehearsal.machine import Machine
from benchmarks.rehearsal.tools import Bench
from benchmarks.rehearsal.trainer.launch import Ended, Order, Trainer
from runbook import launch as launcher
from runbook.config.setup import RunOptions
from runbook.engine.plan.prepare import prepare
from runbook.engine.run import run_setup
from runbook.files import utc_text
from runbook.launch import attempt as attempts
from runbook.launch import local
from runbook.launch.observer import Observer
from runbook.machine import host, kernel_log, preflight
from runbook.machine.gpu import cards as counters
from runbook.records import Check, LaunchResult, Outcome, Reason, RunRecord, Verdict, satisfies

_KEPT = ("HOME", "LANG", "LC_ALL", "TMPDIR", "USER")


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What became of a machine. rows: required ones that are not PASS, the worst first.

    started: launches that were started.
    """

    machine: Machine
    verdict: str
    rows: Sequence[Check]
    started: int
    seconds: float

    @property
    def stopped_by(self) -> tuple[str, ...]:
        """Ids of the rows."""
        return tuple(row.id for row in self.rows)

    @property
    def reasons(self) -> Mapping[str, str]:
        """Outcome and reason of each, by id."""
        return {row.id: f"{row.outcome}: {row.reason}" for row in self.rows}

    @property
    def as_expected(self) -> bool:
        """A healthy machine is GO; a sick one is not, by the rows that should stop it.

        A row that the runbook's own failure left open stops every machine and proves nothing.
        """
        if any(row.code is Reason.HARNESS_ERROR for row in self.rows):
            return False
        if not self.machine.stopped_by:
            return self.verdict == Verdict.GO
        should = set(self.machine.stopped_by)
        return self.verdict != Verdict.GO and should <= set(self.stopped_by)


def judge(machine: Machine, *, keep: Path | None = None) -> Judged:
    """Run all phases of the machine's profile on what it would leave, and take the verdict.

    `keep` is a folder for the run; without it nothing is left.
    """
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as scratch:
        out = keep or Path(scratch) / "out"
        stage = _Stage(machine, Path(scratch) / "machine")
        with stage.set():
            options = RunOptions(profile=machine.profile, out=str(out), command="rehearsal")
            record = run_setup(prepare(options), observer=Observer())
    return _judged(machine, record, stage.started, time.perf_counter() - began)


def _judged(machine: Machine, record: RunRecord, started: int, seconds: float) -> Judged:
    wanted = set(record.required)
    open_rows: list[Check] = [
        check
        for phase in record.phases
        for check in phase.checks
        if check.id in wanted and not satisfies(check)
    ]
    # What only follows from an earlier stop is told last.
    open_rows.sort(key=lambda check: (check.outcome is Outcome.INCOMPLETE, check.outcome.rank))
    return Judged(
        machine=machine,
        verdict=str(record.verdict),
        rows=open_rows,
        started=started,
        seconds=seconds,
    )


class _Clock:
    """The rehearsal's time in the place of the launcher's: a launch takes as long as it says."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class _Child:
    """The process that would have been started."""

    pid, returncode = 0, 0

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str], output: Any) -> None:
        self.argv, self.environment, self.output = argv, environment, output

    def poll(self) -> int:
        return self.returncode

    wait = poll


class _Stage:
    """The rehearsed machine around the engine."""

    def __init__(self, machine: Machine, folder: Path) -> None:
        self.machine = machine
        self.bench = Bench(folder, machine)
        self.trainer = Trainer(machine)
        self.clock = _Clock()
        self.started = 0
        self.changed: dict[int, dict[str, Any]] = {}

    @contextmanager
    def set(self) -> Iterator[None]:
        """Put everything in its place, and take it away again."""
        kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
        path = f"{self.bench.programs}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        environment = {**kept, "PATH": path, "PYTHONPATH": str(self.bench.packages)}
        sensors: dict[str, Any] = {
            "write_speed_mib_s": lambda _folder: self.machine.disk_mib_s,
            "live_processes": self._processes,
        }
        free = self.machine.disk_free_gib * 2**30
        usage = SimpleNamespace(total=2 * free, free=free)
        disk = SimpleNamespace(disk_usage=lambda _folder: usage)
        replaced: dict[str, Any] = {
            "spawn_kept": lambda argv, env, *, output, **_: _Child(argv, env, output),
            # There is no process to sample, to end or to bury.
            **dict.fromkeys(("gpu_samples", "kill_all", "end_kept"), mock.MagicMock()),
        }
        taken = lambda: self.machine.counters_taken_at or self._now()  # noqa: E731
        logged = lambda: self.machine.kernel_log_of or self._now()  # noqa: E731
        with ExitStack() as stack:
            stack.enter_context(mock.patch.dict(os.environ, environment, clear=True))
            stack.enter_context(mock.patch.multiple(host, **sensors))
            stack.enter_context(mock.patch.object(preflight, "shutil", disk))
            stack.enter_context(mock.patch.multiple(local, **replaced))
            stack.enter_context(mock.patch.object(local, "time", self.clock))
            stack.enter_context(mock.patch.object(attempts, "time", self.clock))
            stack.enter_context(mock.patch.object(attempts, "utc_text", self._now))
            stack.enter_context(mock.patch.object(launcher, "Attempt", self._attempt()))
            stack.enter_context(mock.patch.object(counters, "utc_text", taken))
            stack.enter_context(mock.patch.object(kernel_log, "utc_text", logged))
            yield

    def _now(self) -> str:
        """The wall clock of the rehearsed machine, on which its trainer writes heartbeats too."""
        return utc_text(datetime.fromtimestamp(self.trainer.wall_s, tz=UTC))

    def _processes(self) -> list[host.Seen]:
        own = [host.Seen(pid=1, parent=0)]
        return own + [
            host.Seen(pid=4_190_000 + n, parent=1, token="ab" * 16, words=tuple(text.split()))
            for n, text in enumerate(self.machine.leftovers)
        ]

    def _attempt(self) -> type[attempts.Attempt]:
        stage = self

        class Rehearsed(attempts.Attempt):
            """An attempt whose command is not executed: its folder is written."""

            def go_on(self, place: Any) -> LaunchResult:
                def until_end(*_: Any, **__: Any) -> None:
                    self.watched.place = place
                    place.child.returncode = self.watched.ended_with = stage.run(self, place.child)
                    place.watch.update()
                    self.watched.live_status.tell_step(place.watch.ranks)

                with mock.patch.object(self.watched, "until_end", until_end):
                    return super().go_on(place)

        return Rehearsed

    def run(self, attempt: Any, child: _Child) -> int:
        """The trainer's part of an attempt; returns the command's exit code."""
        self.started += 1
        where = attempt.launch.run_dir
        asked = attempt.options.enough
        order = Order(
            launch=attempt.launch,
            argv=child.argv,
            env=child.environment,
            folder=attempt.run_dir,
            attempt=attempt.number,
        )
        enough = (lambda: asked(attempt.run_dir / "training.csv")) if asked else None
        ended: Ended = self.trainer.run(order, enough)
        child.output.write("".join(f"{line}\n" for line in ended.console).encode())
        child.output.flush()
        self.clock.now += ended.duration_s
        self._change(where)
        return ended.code

    def _change(self, where: str) -> None:
        """What the machine's counters show, and its kernel writes, from this launch on."""
        if lines := self.machine.kernel_log.get(where):
            self.bench.log(lines)
        for index, fields in self.machine.after_launch.get(where, {}).items():
            self.changed[index] = {**self.changed.get(index, {}), **fields}
        gpus = [
            self.machine.at_rest(index, **self.changed.get(index, {}))
            for index in range(self.machine.gpus)
        ]
        lost = ""
        if self.trainer.gone:
            bus = gpus[-1].bus.removeprefix("0000")
            lost = (
                f"Unable to determine the device handle for GPU{gpus[-1].index}: {bus}: "
                "Unknown Error"
            )
        if self.changed or lost:
            self.bench.show(gpus, lost=lost)
