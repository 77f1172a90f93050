"""The failing command again, with one change at a time, until the failure goes away.

The changes are data, `configs/triage/steps.yaml`: a new one is one entry there. What is triaged is
found in `triage_target`; nothing here judges a run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, TypeAdapter

from nsa.contract import TRAINING_CSV, NSAError
from nsa.toggles import TOGGLES, Value
from runbook.files import data_path, make_private_dir, write_atomic
from runbook.launch import Budgets, StopRequest, run_launch
from runbook.launch.command import pasteable
from runbook.launch.observer import Observer
from runbook.read import read_training_csv
from runbook.records import Launch, LaunchResult
from runbook.records.launch import with_option
from runbook.records.measurement import Record
from runbook.stats import WindowTooShort, last_window
from runbook.tools.triage_target import Target

_PARITY_TIMEOUT_S = 600.0
_PARITY_ARGV = (
    "python", "-m", "pytest", "-q", "--pyargs", "nsa.tests.test_selection_v2_equiv",
    "-k", "equivalence_various_patterns",
)  # fmt: skip


class TriageStep(Record):
    """One change to the failing command. `set` and `unset` are environment variables.

    `single` runs one process without DDP. `parity` runs the parity tests beside it. `always` runs
    it although it changes no setting (another port is another attempt).
    """

    name: str
    title: str
    source: str
    set: dict[str, str] = Field(default_factory=dict)
    unset: tuple[str, ...] = ()
    single: bool = False
    parity: bool = False
    always: bool = False

    def changes(self, launch: Launch) -> bool:
        """Does it change anything about this launch?

        A value that a toggle has anyway is no change: run all the same, it could be called the
        cure of a failure that comes and goes.
        """
        now = {name: _value(name, launch.env) for name in (*self.set, *self.unset)}
        then = {name: _value(name, self.set) for name in now}
        return now != then or self.always or (self.single and launch.nproc > 1)

    def exports(self) -> list[str]:
        """Lines for a shell that apply it."""
        lines = [f"export {name}={value}" for name, value in self.set.items()]
        return [*lines, *(f"unset {name}" for name in self.unset)]


def _value(name: str, env: Mapping[str, str]) -> Value:
    """What a variable means here: a toggle that is not given has its default."""
    text, toggle = env.get(name), TOGGLES.get(name)
    if toggle is None:
        return text
    try:
        return toggle.default if text is None else toggle.parse(text)
    except NSAError:
        return text


STEPS = TypeAdapter(dict[str, tuple[TriageStep, ...]]).validate_python(
    yaml.safe_load((data_path("configs") / "triage" / "steps.yaml").read_text("utf-8"))
)


def applied(step: TriageStep | None, launch: Launch, *, name: str, steps: int) -> Launch:
    """The launch with one step's change, or as it is (`step` None), for `steps` steps."""
    env, argv, nproc = dict(launch.env), list(launch.argv), launch.nproc
    if step is not None:
        for variable in step.unset:
            env.pop(variable, None)
        env.update(step.set)
        if step.single:
            argv, nproc = _single(argv), 1
            env = {k: v for k, v in env.items() if not k.startswith(("NSA_DDP_", "NCCL_"))}
    return launch.model_copy(
        update={
            "name": name,
            "phase": "triage",
            "argv": tuple(with_option(argv, "--steps", str(steps))),
            "env": env,
            "run_dir": name,
            "nproc": nproc,
            "steps": steps,
            "schedule": None,
            "purpose": step.title if step else "the failing command as it was",
        }
    )


def _single(argv: list[str]) -> list[str]:
    """The same trainer in one process: torchrun and its options become python."""
    if argv[0] != "torchrun":
        return argv
    rest = argv[argv.index("-m") :] if "-m" in argv else argv[1:]
    return with_option(["python", *rest], "--ddp", "0")


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
    done: list[StepResult] = field(default_factory=list)

    def run(self, tell: Callable[[StepResult], None]) -> Triage:
        for number, step in enumerate((None, *STEPS[self.target.symptom])):
            result = self._try(step, f"{number}-{step.name if step else 'as_it_was'}")
            self.done.append(result)
            tell(result)
            if self.stop.requested:
                return self._ended("interrupted", f"interrupted by {self.stop.requested}")
            if result.outcome == "helped" and step is None:
                return self._ended("not_reproduced", f"it did not fail again: {result.detail}")
            if result.outcome == "helped" and step is not None:
                finding = f"it goes away with: {step.title} ({step.source}); {result.detail}"
                return self._ended("found", finding, exports=self._exports(step))
        return self._ended("nothing_helped", f"no step helped; as it was: {self.done[0].detail}")

    def _exports(self, step: TriageStep) -> tuple[str, ...]:
        command = applied(step, self.target.launch, name="x", steps=self.target.steps)
        return tuple(step.exports()) or (f"# {pasteable(command).line}",)

    def _ended(self, outcome: str, finding: str, *, exports: tuple[str, ...] = ()) -> Triage:
        return Triage(outcome=outcome, finding=finding, exports=exports, steps=tuple(self.done))

    def _try(self, step: TriageStep | None, name: str) -> StepResult:
        if step is not None and not step.changes(self.target.launch):
            what = "the command does this already"
            return _said(step, "skipped", what, self.target.launch)
        launch = applied(step, self.target.launch, name=name, steps=self.target.steps)
        result = self._launch(launch)
        helped, detail = self._judge(launch, result)
        if step is not None and step.parity:
            detail = f"{detail}; parity tests: {self._parity(f'{name}-parity')}"
        return _said(step, "helped" if helped else "failed", detail, launch, str(self.out / name))

    def _launch(self, launch: Launch) -> LaunchResult:
        return run_launch(
            launch,
            self.out,
            observer=Observer(),
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
        path = self.out / launch.run_dir / TRAINING_CSV
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
            argv=_PARITY_ARGV,
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
