"""What is to be triaged: a failed launch of a run, or the launch in a directory."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from runbook.config.settings import Settings
from runbook.errors import UsageError
from runbook.folder import LAUNCH_JSON, RECORD_FILE, RESULT_JSON
from runbook.folder.launch.documents import json_object
from runbook.folder.manifest import load_record
from runbook.records import (
    Launch,
    LaunchEntry,
    LaunchResult,
    LaunchStatus,
    Reason,
    RunRecord,
)
from runbook.records.measurement import TOKENS_PER_SECOND

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
        launch = _launch_of(path)
        return _target(launch, floor, f"the launch in {path}", _failed_step(path))
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
        return _target(launch, floor, why, _steps_done(result), symptom=symptom)
    for phase in record.phases:
        trainers = [e.launch for e in phase.launches if e.launch.kind == "trainer"]
        for check in phase.checks if trainers else ():
            unit = check.measurement.unit if check.measurement else ""
            if check.code is Reason.BELOW_LIMIT and unit == TOKENS_PER_SECOND:
                limit = check.limit if isinstance(check.limit, int | float) else None
                limit = limit if floor is None else floor
                return _target(trainers[0], limit, f"{check.id}: {check.reason}", 0)
    entries = [entry for phase in record.phases for entry in phase.launches]
    if own := next((entry.launch.own for entry in entries if entry.launch.own), None):
        raise UsageError(
            f"{folder} is of {own.name}, a trainer of your own: triage changes settings that only "
            "ours has"
        )
    raise UsageError(
        f"no training launch of {folder} failed",
        hint=f"runbook report {shlex.quote(str(folder))} says what did not pass; a launch's "
        "directory can be named, too",
    )


def failed_launches(record: RunRecord) -> list[LaunchEntry]:
    """The launches of our trainer whose end leaves something to triage."""
    entries = [entry for phase in record.phases for entry in phase.launches]
    return [
        entry
        for entry in entries
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


def _failed_step(path: Path) -> int:
    try:
        result = LaunchResult.model_validate(json_object(path / RESULT_JSON))
    except ValidationError:
        return 0
    return _steps_done(result)


def _steps_done(result: LaunchResult) -> int:
    return max((rank.steps_done or 0 for rank in result.ranks), default=0)


def _target(
    launch: Launch, floor: float | None, why: str, failed_step: int, *, symptom: str = ""
) -> Target:
    symptom = symptom or ("failure" if floor is None else "throughput")
    steps = max(_STEPS[symptom], failed_step + _BEYOND)
    return Target(launch=launch, symptom=symptom, why=why, steps=steps, floor_toks_per_s=floor)
