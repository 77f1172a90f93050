"""One attempt of a launch: started, watched, ended, classified, with nothing left alive."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

from runbook.files import utc_text, write_document
from runbook.folder import CONSOLE_LOG, JUNIT_XML, KERNEL_LOG_JSON, LAUNCH_JSON
from runbook.folder.facts import redact_text, redact_variables
from runbook.folder.launch.documents import read_console
from runbook.launch.command import Command, build_environment
from runbook.launch.end import (
    TAIL_LINES,
    Aftermath,
    classify_plain,
    classify_pytest,
    classify_trainer,
    rank_exits,
    signal_name,
)
from runbook.launch.foreign import ForeignWatch, classify_foreign
from runbook.launch.incident import bundle, stopped_at
from runbook.launch.launcher_api import Running, Start
from runbook.launch.supervision import LaunchOptions, Supervision
from runbook.launch.watch import RankWatch
from runbook.machine.kernel_log import (
    XIDS,
    KernelLine,
    concerns,
    describe,
    is_hardware_fault,
)
from runbook.machine.surroundings import limit_met
from runbook.records import End, Kind, Launch, LaunchResult, LaunchStatus, RankExit

_TOKEN_BYTES = 16
# Ends that a GPU which fails can have; all others have a cause of their own.
_MAY_BE_HARDWARE = (
    LaunchStatus.CRASHED,
    LaunchStatus.HUNG,
    LaunchStatus.SILENT,
    LaunchStatus.TIMED_OUT,
    LaunchStatus.NON_FINITE,
    LaunchStatus.HALTED,
)


class Attempt:
    """Runs one command to its end. `run()` is called once."""

    def __init__(
        self, launch: Launch, command: Command, options: LaunchOptions, number: int
    ) -> None:
        self.launch, self.command, self.options = launch, command, options
        self.number, self.token = number, secrets.token_hex(_TOKEN_BYTES)
        self.run_dir = options.run_root / launch.run_dir
        self.console = self.run_dir / CONSOLE_LOG
        self.started_at = utc_text()
        self.began = time.monotonic()
        self.watched = Supervision(launch, options, steps=command.steps)
        self._lasted_s = 0.0

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
            self.command,
            token=self.token,
            run_dir=self.run_dir.resolve(),
            loopback=self.launch.voices > 0 and options.launcher.here,
            own=self.launch.own.env if self.launch.own else (),
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
        try:
            end = self.watched.until_end(place)
        finally:
            place.stop()
        self._lasted_s = round(time.monotonic() - self.began, 3)
        after = place.aftermath(hurry=bool(self.options.stop.requested))
        return self._result(end, place, after)

    def _describe(self) -> None:
        document = {
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
        write_document(self.run_dir / LAUNCH_JSON, document)

    def _with_limits(
        self, end: End, exits: Sequence[RankExit], code: int | None, console: Sequence[str]
    ) -> End:
        """The end as the environment's fault, where a limit of the machine made it."""
        killed = end.kind is Kind.HOST_MEMORY
        if killed or end.status not in (LaunchStatus.CRASHED, LaunchStatus.OUT_OF_MEMORY):
            return end
        signals = {one.signal for one in exits if one.rank == end.culprit_rank}
        met = limit_met(
            end.cause,
            signals=signals | {signal_name(code)},
            console=console[-TAIL_LINES:],
            duration_s=self._lasted_s,
            folder=self.run_dir,
            least_free=self.watched.least_free,
        )
        if not met:
            return end
        return replace(end, status=LaunchStatus.ENVIRONMENT_ERROR, cause=f"{met} ({end.cause})")

    def _result(self, end: End | None, place: Running, after: Aftermath) -> LaunchResult:
        watched, evidence = self.watched, self.watched.evidence
        watched.live_status.watch_numbers()
        lines, _ = read_console(self.console)
        child_code = after.exit_code
        states = [state for _, state in sorted(place.watch.ranks.items())]
        # It waited to begin, or to be found again, where that is not done at once.
        began = self.began if self.options.launcher.here else place.began or self.began
        for state in states:
            state.away_s += max(0.0, began - self.began)
        exits: tuple[RankExit, ...] = ()
        notes: tuple[str, ...] = ()
        if self.launch.has_ranks:
            own, wanted = watched.ended_with, self.launch.nproc
            exits = rank_exits(states, own, lines)
            end = end or classify_trainer(
                states, exits, after, child_code=own, wanted=wanted, console=lines
            )
            end = watched.as_planned(end, exits)
            end, found, notes = bundle(
                place.watch, end, console=lines, load=after.load, where=place.where
            )
            evidence += [path for path in found if path not in evidence]
            exits = tuple(one.model_copy(update={"node": place.where(one.rank)}) for one in exits)
            pids = {state.pid: state.rank for state in states if state.pid is not None}
            end = with_kernel_log(end, after.kernel, slots=after.slots, pids=pids)
            node = "" if end.culprit_rank is None else place.where(end.culprit_rank)
            if node and end.cause:
                cause = f"{end.cause}; rank {end.culprit_rank} ran on node {node}"
                end = replace(end, cause=cause)
            if after.kernel:
                evidence.append(self.run_dir / KERNEL_LOG_JSON)
        elif end is None and self.launch.own is not None:
            step = max(state.step for state in states)
            end = classify_foreign(
                watched.ended_with, oom=after.oom, console=lines, step=step, steps=self.launch.steps
            )
        elif end is None and self.launch.kind == "collect":
            end = classify_plain(child_code, lines)
        elif end is None:
            junit = (self.run_dir / JUNIT_XML).is_file()
            end = classify_pytest(child_code, junit=junit, console=lines)
        end = self._with_limits(end, exits, child_code, lines)
        files = [self.console, *evidence] if end.status is not LaunchStatus.COMPLETED else []
        # Its cause may quote what a trainer said last, and goes into every report.
        told = asdict(replace(end, cause=redact_text(end.cause)))
        return LaunchResult(
            **told,
            exit_code=child_code,
            ranks=exits,
            started_at=self.started_at,
            duration_s=self._lasted_s,
            attempts=self.number,
            evidence=tuple(p.relative_to(self.options.run_root).as_posix() for p in files),
            run_token=self.token,
            steps=self.command.steps,
            notes=(*watched.notes, *watched.live_status.notes, *notes),
            stopped_at=stopped_at(self.run_dir, end),
            stopped=watched.stopped,
        )


def with_kernel_log(
    end: End, lines: Sequence[KernelLine], *, slots: Collection[str], pids: Mapping[int, int]
) -> End:
    """The end with the cause that the kernel logged while the launch ran.

    `slots` are the PCI places of the GPUs that the launch may use (errors of all count if none is
    known), `pids` the ranks' processes with their ranks. An Xid that no program can cause makes a
    crash or a hang a hardware error; any other one is named beside the cause.
    """
    if end.status not in _MAY_BE_HARDWARE:
        return end
    seen = [line for line in lines if line.xid is not None and concerns(line, slots)]
    for line in seen:
        if line.xid is not None and is_hardware_fault(line.xid) and "Nonfatal" not in line.text:
            cause = f"{_said(line)}; {XIDS[line.xid].remedy} ({end.cause})"
            status = LaunchStatus.HARDWARE_ERROR
            return replace(end, status=status, cause=cause, node=line.node)
    killed = next((line for line in lines if line.pid in pids), None)
    if killed is not None and killed.pid is not None and end.status is LaunchStatus.CRASHED:
        rank = pids[killed.pid]
        cause = f"rank {rank}: the kernel killed it for memory, as its log says ({end.cause})"
        out = LaunchStatus.OUT_OF_MEMORY
        return End(status=out, cause=cause, culprit_rank=rank, kind=Kind.HOST_MEMORY)
    if seen:
        return replace(end, cause=f"{end.cause}; the kernel log says {_said(seen[0])}")
    return end


def _said(line: KernelLine) -> str:
    on = f"node {line.node}, " if line.node else ""
    where = f"GPU {line.pci[0]}: " if line.pci else ""
    return f"{on}{where}{describe(line.xid or 0)}"
