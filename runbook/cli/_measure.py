"""`runbook run --dry-run --measure`: a few real steps on this machine, and nothing left behind."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from nsa.contract import TRAINING_CSV
from runbook.config import registry
from runbook.config.setup import Setup
from runbook.engine.plan.forecast import SKIPPED, Pace
from runbook.errors import UsageError
from runbook.folder.launch.evidence import read_training_csv
from runbook.launch import StopRequest, run_launch, stop_on_signals
from runbook.launch.observer import Observer
from runbook.records import Launch
from runbook.records.launch import with_option

STEPS = 10
_PHASE = "baseline"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The pace that was measured, or why there is none; `interrupted` is the signal if one came."""

    pace: Pace | None = None
    problem: str = ""
    interrupted: str = ""


def trial_launch(setup: Setup) -> Launch:
    """The first launch of the planned baseline, cut to a few steps.

    Raises `UsageError` where the profile plans no such launch.
    """
    phase = registry.phases().get(_PHASE)
    planned = phase.plan(setup.context({})) if phase and _PHASE in setup.profile.phases else []
    for launch in planned:
        if launch.kind == "trainer" and launch.schedule is None:
            argv = tuple(with_option(launch.argv, "--steps", str(STEPS)))
            return launch.model_copy(update={"argv": argv, "steps": STEPS})
    raise UsageError(f"--measure: profile {setup.profile.name} plans no launch of {_PHASE}")


def measure_here(setup: Setup) -> Trial:
    """Run it in a temporary folder, which is removed; what goes wrong is told, not raised."""
    launch = trial_launch(setup)
    with (
        TemporaryDirectory(prefix="runbook-measure-") as folder,
        stop_on_signals(StopRequest()) as stop,
    ):
        root = Path(folder)
        # torchrun and torch's compiler leave files in it.
        scratch = root / "tmp"
        scratch.mkdir()
        machine = {**os.environ, "TMPDIR": str(scratch)}
        result = run_launch(
            launch, root, observer=Observer(), stop=stop, retry=False, machine=machine
        )
        if stop.requested:
            return Trial(problem=result.cause, interrupted=stop.requested)
        if not result.ok:
            return Trial(problem=f"{launch.phase}/{launch.name} {result.status}: {result.cause}")
        path = root / launch.run_dir / TRAINING_CSV
        if not path.is_file():
            return Trial(problem=f"{launch.phase}/{launch.name} wrote no {TRAINING_CSV}")
        frame = read_training_csv(path, relative_to=root).frame
    if "dt_s" not in frame or len(frame) < STEPS or not bool((frame["dt_s"] > 0).all()):
        return Trial(problem=f"{launch.phase}/{launch.name} wrote no usable times of {STEPS} steps")
    step_s = float(frame["dt_s"].iloc[SKIPPED:].median())
    startup_s = max(0.0, result.duration_s - float(frame["dt_s"].sum()))
    return Trial(pace=Pace(step_s=step_s, startup_s=startup_s, launch=launch))
