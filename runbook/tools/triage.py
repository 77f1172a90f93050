"""The failing command again, with one change at a time, until the failure goes away.

A failure may come and go: a change is believed only when chance alone would hardly look like it.
The changes are in `triage_steps`; nothing here judges a run.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from math import comb
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from nsa.contract import TRAINING_CSV
from runbook.config.settings import Settings
from runbook.errors import UsageError
from runbook.files import make_new_dir, write_document
from runbook.folder import LAUNCH_JSON, RECORD_FILE
from runbook.folder.launch.documents import json_object, launch_result
from runbook.folder.launch.evidence import read_training_csv
from runbook.folder.manifest import load_record
from runbook.launch import run_launch
from runbook.launch.command import pasteable
from runbook.launch.observer import Observer, StopRequest
from runbook.launch.supervision import LaunchOptions
from runbook.records import Launch, LaunchEntry, LaunchResult, LaunchStatus, Reason, RunRecord
from runbook.records.measurement import TOKENS_PER_SECOND
from runbook.stats.throughput import WindowTooShort, last_window
from runbook.tools.triage_steps import AS_IT_WAS, STEPS, TriageStep, applied

# What a failure is triaged as, by how the launch ended; else `failure`.
SYMPTOMS = {LaunchStatus.NON_FINITE: "non_finite", LaunchStatus.OUT_OF_MEMORY: "memory"}
_STEPS = {"failure": 30, "non_finite": 30, "memory": 30, "throughput": 80}
_BEYOND = 10
_NOT_A_FAULT = (LaunchStatus.COMPLETED, LaunchStatus.NOT_RUN, LaunchStatus.INTERRUPTED)


@dataclass(frozen=True, kw_only=True)
class Target:
    """The launch that is run again. `floor_toks_per_s` is what counts as fast enough."""

    launch: Launch
    symptom: str
    why: str
    steps: int
    floor_toks_per_s: float | None = None


def find_target(path: Path, *, floor: float | None = None) -> Target:
    """Understand `path`: a run's folder, or a launch's directory.

    Raises `UsageError` if it is neither, or if nothing in the run failed.
    """
    if (path / RECORD_FILE).is_file():
        return _of_run(path, floor)
    if (path / LAUNCH_JSON).is_file():
        launch, ended = _launch_of(path), launch_result(path, [])
        return _target(launch, floor, f"the launch in {path}", ended.steps_done if ended else 0)
    raise UsageError(
        f"{path} cannot be triaged", hint="give a run's folder, or a launch's directory in it"
    )


def with_choices(target: Target, settings: Settings, *, steps: int | None = None) -> Target:
    """The target with `--set` and `--steps` applied: every step, and the first try, has them."""
    launch = target.launch.model_copy(
        update={
            "env": {**target.launch.env, **settings.toggles},
            "config_overrides": {**target.launch.config_overrides, **settings.config_overrides},
        }
    )
    return replace(target, launch=launch, steps=target.steps if steps is None else steps)


def _of_run(folder: Path, floor: float | None) -> Target:
    record = load_record(folder)
    if bad := failed_launches(record):
        launch, result = bad[0].launch, bad[0].result
        why = f"{launch.phase}/{launch.name} {result.status.value}: {result.cause}"
        symptom = SYMPTOMS.get(result.status, "failure")
        return _target(launch, floor, why, result.steps_done, symptom=symptom)
    for phase in record.phases:
        trainers = [e.launch for e in phase.launches if e.launch.kind == "trainer"]
        for check in phase.checks if trainers else ():
            unit = check.measurement.unit if check.measurement else ""
            if check.code is Reason.BELOW_LIMIT and unit == TOKENS_PER_SECOND:
                limit = check.limit if isinstance(check.limit, int | float) else None
                limit = limit if floor is None else floor
                return _target(trainers[0], limit, f"{check.id}: {check.reason}", 0)
    if own := next((one.launch.own for one in record.launches() if one.launch.own), None):
        raise UsageError(
            f"{folder} is of {own.name}, a trainer of your own: triage changes settings that only "
            "ours has"
        )
    raise UsageError(
        f"no training launch of {folder} failed",
        hint=f"runbook report {shlex.quote(str(folder))} says what passed and what did not; a "
        "launch's directory can be named, too",
    )


def failed_launches(record: RunRecord) -> list[LaunchEntry]:
    """The launches of our trainer whose end leaves something to triage."""
    return [
        entry
        for entry in record.launches()
        if entry.launch.kind == "trainer" and entry.result.status not in _NOT_A_FAULT
    ]


def _launch_of(path: Path) -> Launch:
    try:
        launch = Launch.model_validate(json_object(path / LAUNCH_JSON).get("launch"))
    except ValidationError as error:
        raise UsageError(f"{path}/{LAUNCH_JSON} cannot be read: {error}") from error
    if launch.kind != "trainer":
        raise UsageError(f"{path} is a {launch.kind} launch; only training runs are triaged")
    return launch


def _target(
    launch: Launch, floor: float | None, why: str, failed_step: int, *, symptom: str = ""
) -> Target:
    symptom = symptom or ("failure" if floor is None else "throughput")
    steps = max(_STEPS[symptom], failed_step + _BEYOND)
    return Target(launch=launch, symptom=symptom, why=why, steps=steps, floor_toks_per_s=floor)


# The command as it was has to fail within so many tries.
_FIRST_TRIES = 3
# A step is repeated so often at most, and believed where the exact test of Fisher for two rates
# of failure says at most this.
_MOST_TRIES = 6
_CHANCE = 0.05
_SHOWN = "shown:"
_PARITY_TIMEOUT_S = 600.0
_PARITY_ARGV = (
    "python", "-m", "pytest", "-q", "--pyargs", "nsa.tests.test_selection_v2_equiv",
    "-k", "equivalence_various_patterns",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step did. `outcome` is helped, failed or skipped."""

    name: str
    title: str
    source: str
    outcome: str
    detail: str
    command: str
    run_dir: str = ""


@dataclass(frozen=True, kw_only=True)
class Triage:
    """All steps that were run, every repetition a row of its own.

    `outcome`: found, nothing_helped, flaky (a step looks good, and chance could look the same),
    not_reproduced or interrupted.
    """

    outcome: str
    finding: str
    exports: tuple[str, ...]
    steps: tuple[StepResult, ...]

    def document(self) -> dict[str, Any]:
        """For triage.json."""
        return {"schema_version": 1, **asdict(self)}


def run_steps(
    target: Target,
    out: Path,
    *,
    stop: StopRequest,
    tell: Callable[[StepResult], None],
) -> Triage:
    """Run the steps for the target's symptom below `out`, a new folder.

    First the command as it was, which has to fail: one that does not come back in three tries
    cannot be triaged. Each step then changes one thing against that command. One under which it
    works is repeated, in turn with the command as it was, until chance would look so in at most 5 %
    of cases, and is the finding then. Writes `triage.json`. Raises `UsageError` if `out`
    cannot be made.
    """
    make_new_dir("--out", out)
    options = LaunchOptions(run_root=out, observer=Observer(), stop=stop, retry=False)
    triage = _Runner(target=target, options=options, tell=tell).run()
    write_document(out / "triage.json", triage.document())
    return triage


@dataclass(kw_only=True)
class _Runner:
    target: Target
    options: LaunchOptions
    tell: Callable[[StepResult], None]
    done: list[StepResult] = field(default_factory=list)
    # Of every try of the command as it was: did it fail?
    failed: list[bool] = field(default_factory=list)
    status: LaunchStatus = LaunchStatus.NOT_RUN

    def run(self) -> Triage:
        for number in range(_FIRST_TRIES):
            first = self._told(AS_IT_WAS, f"0-as_it_was{_numbered(number)}")
            if self.options.stop.requested:
                return self._interrupted()
            if first.outcome != "helped":
                break
        else:
            tries = f"{_FIRST_TRIES} tries"
            return self._ended("not_reproduced", f"not again in {tries}: {first.detail}")
        symptom = self.target.symptom
        if symptom != "throughput":
            symptom = SYMPTOMS.get(self.status, "failure")
        for place, step in enumerate(STEPS[symptom], start=1):
            name = f"{place}-{step.name}"
            result = self._told(step, name)
            verdict = self._repeated(step, name) if result.outcome == "helped" else ""
            if self.options.stop.requested:
                return self._interrupted()
            if verdict:
                finding = f"{step.title} ({step.source}); {verdict}"
                if verdict.startswith(_SHOWN):
                    finding = f"it goes away with: {finding}"
                    return self._ended("found", finding, exports=self._exports(step))
                return self._ended("flaky", f"it comes and goes, also without: {finding}")
        return self._ended("nothing_helped", f"no step helped; as it was: {first.detail}")

    def _repeated(self, step: TriageStep, name: str) -> str:
        """What the repetitions say of a step that helped once; empty if it failed after all."""
        for again in range(1, _MOST_TRIES + 1):
            tries, fails = len(self.failed), sum(self.failed)
            chance = comb(tries, fails) / comb(tries + again, fails)
            counted = f"{fails} of {tries} tries failed as it was, 0 of {again} with it"
            if chance <= _CHANCE:
                return f"{_SHOWN} {counted}"
            if again == _MOST_TRIES:
                return f"not shown: {counted}, which chance alone does in {chance:.0%} of cases"
            self._told(AS_IT_WAS, f"{name}-without{_numbered(again)}")
            if self.options.stop.requested:
                return ""
            result = self._told(step, f"{name}{_numbered(again)}")
            if self.options.stop.requested or result.outcome != "helped":
                return ""
        return ""

    def _told(self, step: TriageStep, name: str) -> StepResult:
        result = self._try(step, name)
        if step is AS_IT_WAS:
            self.failed.append(result.outcome != "helped")
        self.done.append(result)
        self.tell(result)
        return result

    def _interrupted(self) -> Triage:
        return self._ended("interrupted", f"interrupted by {self.options.stop.requested}")

    def _exports(self, step: TriageStep) -> tuple[str, ...]:
        command = applied(step, self.target.launch, name="x", steps=self.target.steps)
        return tuple(step.exports(self.target.launch)) or (f"# {pasteable(command).line}",)

    def _ended(self, outcome: str, finding: str, *, exports: tuple[str, ...] = ()) -> Triage:
        return Triage(outcome=outcome, finding=finding, exports=exports, steps=tuple(self.done))

    def _try(self, step: TriageStep, name: str) -> StepResult:
        launch, run_dir = self.target.launch, ""
        outcome, detail = "skipped", "it would change nothing"
        if step.changes(launch):
            launch = applied(step, launch, name=name, steps=self.target.steps)
            outcome, detail = self._outcome(launch, step)
            run_dir = str(self.options.run_root / name)
        return StepResult(
            **step.model_dump(include={"name", "title", "source"}),
            outcome=outcome,
            detail=detail,
            command=pasteable(launch).line,
            run_dir=run_dir,
        )

    def _outcome(self, launch: Launch, step: TriageStep) -> tuple[str, str]:
        result = run_launch(launch, self.options)
        self.status = result.status
        helped, detail = self._judge(launch, result)
        if step.parity:
            detail = f"{detail}; parity tests: {self._parity(f'{launch.name}-parity')}"
        return "helped" if helped else "failed", detail

    def _judge(self, launch: Launch, result: LaunchResult) -> tuple[bool, str]:
        if not result.ok:
            return False, f"{result.status.value}: {result.cause}"
        if self.target.symptom != "throughput":
            return True, f"all {launch.steps} steps done"
        floor = self.target.floor_toks_per_s or 0.0
        root = self.options.run_root
        path = root / launch.run_dir / TRAINING_CSV
        try:
            measured = last_window(read_training_csv(path, relative_to=root))
        except (OSError, WindowTooShort) as error:
            return False, f"no throughput: {error}"
        value = float(measured.value)
        return value >= floor, f"{value:.1f} tok/s, wanted {floor:g} (last {measured.n} steps)"

    def _parity(self, name: str) -> str:
        launch = Launch(
            name=name,
            phase="triage",
            kind="pytest",
            argv=_PARITY_ARGV,
            env={},
            run_dir=name,
            nproc=1,
            steps=0,
            timeout_s=_PARITY_TIMEOUT_S,
        )
        result = run_launch(launch, self.options)
        return "passed" if result.ok and result.exit_code == 0 else f"FAILED ({result.cause})"


def _numbered(again: int) -> str:
    return f"-again{again}" if again else ""
