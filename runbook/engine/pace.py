"""The pace of the run behind which a plan starts, for estimates of the launches behind it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nsa.contract import TRAINING_CSV
from runbook.engine.forecast import Pace
from runbook.engine.matches import ground_of
from runbook.errors import RunbookError
from runbook.folder.integrity import go_record
from runbook.folder.launch import read_training_csv

if TYPE_CHECKING:
    from runbook.config.setup import Setup
    from runbook.records import LaunchEntry

# The first steps allocate, compile and rebuild buckets.
SKIPPED = 3
# A launch with fewer steps after these says nothing of the pace of thousands.
_FEWEST = 20


def pace_of_the_go(setup: Setup) -> Pace | None:
    """Seconds of a step and of the start-up in the plain launch of that run with the most steps.

    None where the plan stands on no run, or that one has no such launch with enough usable times.
    """
    plan = setup.profile.plan
    if plan is None or not plan.go:
        return None
    run_id = plan.go.partition(":")[0]
    folder = Path(setup.options.out) / run_id
    try:
        record = go_record(folder)
        found = ground_of(record, setup.profile.ranks) if record else []
        plain = [entry for entry in found if entry.launch.schedule is None]
        entry = max(plain, key=_steps_done, default=None)
        if entry is None:
            return None
        path = folder / entry.launch.run_dir / TRAINING_CSV
        frame = read_training_csv(path, relative_to=folder).frame
    except (RunbookError, OSError):
        return None  # the launch itself says what is wrong with that run
    if "dt_s" not in frame or len(frame) < SKIPPED + _FEWEST or not (frame["dt_s"] > 0).all():
        return None
    return Pace(
        step_s=float(frame["dt_s"].iloc[SKIPPED:].mean()),
        startup_s=max(0.0, entry.result.duration_s - float(frame["dt_s"].sum())),
        launch=entry.launch,
        source=f"the rate of {entry.launch.id} in {run_id}",
    )


def _steps_done(entry: LaunchEntry) -> int:
    """How many it did itself: one that goes on or is stopped does fewer than it is told of."""
    return max((rank.steps_done or 0 for rank in entry.result.ranks), default=0)
