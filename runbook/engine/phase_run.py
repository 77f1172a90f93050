"""One phase, run: plan, collect, launch, read, judge. Whatever goes wrong becomes a row."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from nsa.contract import LATEST_LINK
from nsa.contract.writing import link_latest
from runbook.config.registry import Judgement, Phase
from runbook.engine import RunInFolder, missing_rows, record_of
from runbook.engine.earlier import keep_accepted
from runbook.engine.plan.prepare import needs_of
from runbook.engine.scope import what_ran
from runbook.engine.starting import PREEMPTION, begin_at, known_end, not_run
from runbook.errors import RunbookError
from runbook.files import utc_text
from runbook.folder import Journal
from runbook.folder.facts import shown_fact, write_facts
from runbook.folder.launch.documents import load_of
from runbook.folder.launch.evidence import read_training_csv
from runbook.launch import adopt_launch, run_launch, set_aside
from runbook.launch.launcher_api import Launcher, launcher
from runbook.launch.observer import Interrupted, Observer, StopRequest
from runbook.launch.supervision import LaunchOptions
from runbook.records import (
    THE_RUN,
    Launch,
    LaunchEntry,
    LaunchResult,
    LaunchStatus,
    PhaseRecord,
    Reason,
)
from runbook.records.evidence import Fact
from runbook.records.run import Ran


@dataclass(kw_only=True)
class RunState(RunInFolder):
    """What the phases of one run share."""

    journal: Journal
    observer: Observer
    stop: StopRequest
    finished_launches: dict[tuple[str, str], LaunchResult] = field(default_factory=dict)
    blocked: LaunchResult | None = None

    @cached_property
    def launcher(self) -> Launcher:
        """Where the launches of this run run."""
        return launcher(self.setup.options.launcher).launcher(
            self.setup, self.run_root, self.observer.note
        )

    @property
    def launch_options(self) -> LaunchOptions:
        """What all launches of this run are started with."""
        return LaunchOptions(
            run_root=self.run_root,
            observer=self.observer,
            stop=self.stop,
            retry=self.setup.options.retry,
            launcher=self.launcher,
        )


class PhaseRun:
    """Runs one phase once. `run()` always returns a record."""

    def __init__(self, phase: Phase, state: RunState) -> None:
        self.phase, self.state = phase, state
        self.context = state.context(phase)
        self.entries: list[LaunchEntry] = []
        self.ran: tuple[Ran, ...] = ()
        self.started_at, self.began = utc_text(), time.monotonic()

    def run(self) -> PhaseRecord:
        """Run and judge the phase.

        This is the one place of the program that catches every exception: a defect in one phase
        must not take the others' evidence with it. It becomes INCOMPLETE rows that name the file
        with the traceback.
        """
        try:
            with self.state.stop.interruptible():
                judgement = self._run()
            return self._record(judgement)
        except Interrupted as error:
            return self._without_judgement(
                Reason.INTERRUPTED, f"interrupted by {error}", "continue the run with --resume"
            )
        except Exception as error:  # noqa: BLE001 - see above
            path = self._keep_traceback()
            return self._without_judgement(
                Reason.HARNESS_ERROR,
                f"the runbook itself failed: {type(error).__name__}: {error}",
                f"read {path}; report it as a defect of the runbook",
                evidence=path,
            )

    def _run(self) -> Judgement:
        launches = self.phase.plan(self.context)
        certain = [launch for launch in launches if not launch.conditional]
        self.state.observer.phase_started(self.phase.name, self.phase.title, len(certain))
        self.state.journal.append("phase_started", sync=True, phase=self.phase.name)
        if self.phase.collects:
            self._collect()
        for launch in certain:
            self._launch(launch)
        if self.phase.remembers:
            profile = self.state.setup.profile.name
            keep_accepted(self.state.run_root, self.phase.name, self.entries, profile=profile)
        evidence = self.state.read(self.phase, self.entries)
        more = {launch.name: launch for launch in launches if launch.conditional}
        while names := [n for n in self.phase.needs_more(evidence, self.context) if n in more]:
            count = "one more launch is" if len(names) == 1 else f"{len(names)} more launches are"
            self.state.observer.note(f"{self.phase.name}: {count} needed")
            for name in names:
                self._launch(more.pop(name))
            evidence = self.state.read(self.phase, self.entries)
        self.ran = what_ran(evidence)
        if load := load_of(one.load for one in evidence.launches.values()):
            told = {f"load.{self.phase.name}": str(load)}
            self.state.journal.append("load", environment=told)
        judgement = self.state.judged(self.phase, evidence)
        self.state.evidence[self.phase.name] = evidence
        return judgement

    def _collect(self) -> None:
        state = self.state
        here = state.launcher.here
        facts = self._facts_of_this_machine() if here else self._facts_of_nodes()
        with state.stop.deferred():
            state.facts |= facts
            write_facts(state.run_root, facts)
            shown = {name: shown_fact(fact) for name, fact in facts.items()}
            environment = {name: text for name, text in shown.items() if text}
            state.journal.append("facts", environment=environment)

    def _facts_of_nodes(self) -> dict[str, Fact]:
        """Those of the nodes; where they cannot be had, nothing else is started."""
        from runbook.engine.on_nodes import collect_on_nodes

        state = self.state
        facts, ended = collect_on_nodes(state.setup, state.launch_options)
        if not ended.ok and not state.stop.requested:
            state.observer.note(f"preflight: the nodes could not be asked: {ended.cause}")
            state.blocked = not_run(ended.cause, follows=f"{self.phase.name}.nodes")
        return facts

    def _facts_of_this_machine(self) -> dict[str, Fact]:
        from runbook.machine.preflight import collect_preflight

        state = self.state
        profile, needs = state.setup.profile, needs_of(state.setup)
        return collect_preflight(
            state.run_root,
            expected_branch=profile.branch,
            note=state.observer.note,
            trainer=profile.trainer,
            # What launches set for CUDA itself, such as the visible devices.
            variables=state.setup.cuda_exports,
            needs=("; ".join(needs.lacks), "; ".join(needs.has)),
        )

    def _launch(self, launch: Launch) -> None:
        state = self.state
        done = state.finished_launches.get((self.phase.name, launch.name))
        if done is None and state.stop.requested:
            cause = f"interrupted by {state.stop.requested} before it started"
            done = not_run(cause, follows=THE_RUN)
        done = done or state.blocked
        if done is None and not state.setup.options.keep_going:
            done = known_end(launch, [*self._before(launch), *self.entries])
            if done is not None:
                state.observer.note(f"{self.phase.name}/{launch.name} is not started: {done.cause}")
        if done is None:
            with state.stop.deferred():
                done = self._start(launch)
                state.journal.append(
                    "launch_finished",
                    phase=self.phase.name,
                    launch=launch.name,
                    result=done.model_dump(mode="json"),
                )
                state.observer.launch_finished(launch, done)
                if done.status is LaunchStatus.PREEMPTED and done.stopped is None:
                    # Who ends a trainer wants its machine: what is left is for `--resume`.
                    state.stop.request(PREEMPTION)
        self.entries.append(LaunchEntry(launch=launch, result=done))

    def _before(self, launch: Launch) -> list[LaunchEntry]:
        """Launches of earlier phases that can tell how this one would end."""
        every = (one for phase in self.state.evidence.values() for one in phase.launches.values())
        alike = (one for one in every if launch.own is not None and one.launch.own == launch.own)
        return [LaunchEntry(launch=one.launch, result=one.result) for one in alike]

    def _start(self, launch: Launch) -> LaunchResult:
        state = self.state
        run_dir = state.run_root / launch.run_dir
        how = replace(state.launch_options, enough=self._enough(launch))
        if run_dir.exists():  # it belongs to one launch: what a crash left of another is kept
            left = adopt_launch(launch, how)
            if left is not None:
                return left
            set_aside(run_dir, "unfinished")
        state.journal.append("launch_started", phase=self.phase.name, launch=launch.name)
        try:
            begun = begin_at(state.run_root, launch) if launch.resumes else None
        except RunbookError as error:
            status = LaunchStatus.ENVIRONMENT_ERROR
            return LaunchResult(status=status, attempts=0, cause=str(error))
        for text in begun.refused if begun else ():
            state.observer.note(f"{launch.name}: not used: {text}")
        if begun is not None and begun.refused:
            state.observer.note(f"{launch.name}: goes on from step {begun.step} ({begun.path})")
        self._link(run_dir)
        return run_launch(launch, replace(how, begun=begun))

    def _link(self, run_dir: Path) -> None:
        """Let `latest` beside the run's folder lead to this launch; no run depends on it."""
        try:
            link_latest(self.state.run_root.parent, run_dir)
        except OSError as error:
            place = self.state.run_root.parent / LATEST_LINK
            self.state.observer.note(f"no link {place}: {error.strerror or error}")

    def _enough(self, launch: Launch) -> Callable[[Path], bool] | None:
        if launch.schedule is None:
            return None

        def enough(path: Path) -> bool:
            log = read_training_csv(path, relative_to=self.state.run_root)
            return self.phase.enough(log, launch, self.context)

        return enough

    def _keep_traceback(self) -> str:
        name = f"harness_error_{self.phase.name}.txt"
        number = 1
        while (path := self.state.run_root / name).exists():
            number += 1
            name = f"harness_error_{self.phase.name}_{number}.txt"
        path.write_text(traceback.format_exc(), encoding="utf-8")
        return name

    def _without_judgement(
        self, code: Reason, reason: str, remedy: str, *, evidence: str = ""
    ) -> PhaseRecord:
        rows = missing_rows(
            self.phase.check_ids(self.context),
            self.state.setup.required,
            code=code,
            reason=reason,
            remedy=remedy,
            rerun=self.context.rerun(self.phase.name),
            evidence=(evidence,) if evidence else (),
            follows=THE_RUN if code is Reason.INTERRUPTED else "",
        )
        return self._record(Judgement(checks=rows))

    def _record(self, judgement: Judgement) -> PhaseRecord:
        return record_of(
            self.phase,
            judgement,
            self.entries,
            started_at=self.started_at,
            duration_s=time.monotonic() - self.began,
            ran=self.ran,
        )
