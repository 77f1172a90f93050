"""The failing command again, then step by step, until one makes the failure go away."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from runbook.files import make_private_dir, write_atomic
from runbook.launch import Budgets, StopRequest, run_launch
from runbook.launch.command import pasteable
from runbook.launch.observer import Observer
from runbook.read import read_training_csv
from runbook.records import Launch, LaunchResult
from runbook.stats import WindowTooShort, last_window
from runbook.tools.triage.steps import PARITY_ARGV, STEPS, TriageStep, applied
from runbook.tools.triage.target import Target

_PARITY_TIMEOUT_S = 600.0


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
    """All steps that were run. `outcome`: found, nothing_helped, not_reproduced or interrupted."""

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
    stop: StopRequest | None = None,
    budgets: Budgets | None = None,
    observer: Observer | None = None,
    tell: Callable[[StepResult], None] = lambda _result: None,
) -> Triage:
    """Run the steps for the target's symptom below `out`, a new folder.

    First the command as it was: a failure that does not come back cannot be triaged. Each step
    then changes one thing against that command, and the first one under which it works is the
    finding. Writes `triage.json`. Raises `FileExistsError` if `out` exists.
    """
    make_private_dir(out)
    runner = _Runner(
        target=target,
        out=out,
        stop=stop or StopRequest(),
        budgets=budgets,
        observer=observer or Observer(),
    )
    triage = runner.run(tell)
    write_atomic(out / "triage.json", json.dumps(triage.document(), indent=2) + "\n")
    return triage


@dataclass(kw_only=True)
class _Runner:
    target: Target
    out: Path
    stop: StopRequest
    budgets: Budgets | None
    observer: Observer
    done: list[StepResult] = field(default_factory=list)

    def run(self, tell: Callable[[StepResult], None]) -> Triage:
        first = self._try(None, "0-as_it_was")
        self.done.append(first)
        tell(first)
        if self.stop.requested:
            return self._ended("interrupted", f"interrupted by {self.stop.requested}")
        if first.outcome == "helped":
            return self._ended("not_reproduced", f"it did not fail again: {first.detail}")
        for number, step in enumerate(STEPS[self.target.symptom], start=1):
            result = self._step(step, f"{number}-{step.name}")
            self.done.append(result)
            tell(result)
            if self.stop.requested:
                return self._ended("interrupted", f"interrupted by {self.stop.requested}")
            if result.outcome == "helped":
                finding = f"it goes away with: {step.title} ({step.source}); {result.detail}"
                return self._ended("found", finding, exports=self._exports(step))
        return self._ended("nothing_helped", f"no step helped; as it was: {first.detail}")

    def _exports(self, step: TriageStep) -> tuple[str, ...]:
        command = applied(step, self.target.launch, name="x", steps=self.target.steps)
        return tuple(step.exports()) or (f"# {pasteable(command).line}",)

    def _ended(self, outcome: str, finding: str, *, exports: tuple[str, ...] = ()) -> Triage:
        return Triage(outcome=outcome, finding=finding, exports=exports, steps=tuple(self.done))

    def _step(self, step: TriageStep, name: str) -> StepResult:
        launch = self.target.launch
        if not step.changes(launch):
            return _said(step, "skipped", "the command does this already", launch)
        return self._try(step, name)

    def _try(self, step: TriageStep | None, name: str) -> StepResult:
        launch = applied(step, self.target.launch, name=name, steps=self.target.steps)
        result = self._launch(launch)
        helped, detail = self._judge(launch, result)
        if step is not None and step.parity:
            parity = self._parity(f"{name}-parity")
            detail = f"{detail}; parity tests: {parity}"
        return _said(step, "helped" if helped else "failed", detail, launch, str(self.out / name))

    def _launch(self, launch: Launch) -> LaunchResult:
        return run_launch(
            launch,
            self.out,
            observer=self.observer,
            stop=self.stop,
            budgets=self.budgets,
            retry=False,
        )

    def _judge(self, launch: Launch, result: LaunchResult) -> tuple[bool, str]:
        if not result.ok:
            return False, f"{result.status.value}: {result.cause}"
        if self.target.symptom == "failure":
            return True, f"all {launch.steps} steps done"
        floor = self.target.floor_toks_per_s or 0.0
        path = self.out / launch.run_dir / "training.csv"
        try:
            measured = last_window(read_training_csv(path, relative_to=self.out))
        except (OSError, WindowTooShort) as error:
            return False, f"no throughput: {error}"
        value = float(measured.value)
        return value >= floor, f"{value:.1f} tok/s, wanted {floor:g} (last {measured.n} steps)"

    def _parity(self, name: str) -> str:
        launch = Launch(
            name=name,
            phase="triage",
            kind="pytest",
            argv=PARITY_ARGV,
            env={},
            run_dir=name,
            nproc=1,
            steps=0,
            timeout_s=_PARITY_TIMEOUT_S,
        )
        result = self._launch(launch)
        return "passed" if result.ok and result.exit_code == 0 else f"FAILED ({result.cause})"


def _said(
    step: TriageStep | None, outcome: str, detail: str, launch: Launch, run_dir: str = ""
) -> StepResult:
    return StepResult(
        name=step.name if step else "as_it_was",
        title=step.title if step else "the command as it was",
        source=step.source if step else "the failing launch",
        outcome=outcome,
        detail=detail,
        command=pasteable(launch).line,
        run_dir=run_dir,
    )
