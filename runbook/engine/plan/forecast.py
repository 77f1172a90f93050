"""How long launches take on this machine: from steps that were measured, else from the profile.

A launch takes its start-up and its steps; a step takes as long as its share of the batch for each
rank. Only for estimates: a run that cannot be read is no ground for one, and `runbook report` says
what is wrong with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from nsa.contract import TRAINING_CSV
from runbook.config.profile import Profile
from runbook.engine.earlier import ground_of
from runbook.errors import RunbookError
from runbook.folder.integrity import go_record
from runbook.folder.launch.evidence import read_training_csv
from runbook.records import Launch
from runbook.records.measurement import duration_text

if TYPE_CHECKING:
    from runbook.config.setup import Setup


_BATCH = "train.batch_size"


@dataclass(frozen=True, kw_only=True)
class Pace:
    """What was measured: seconds of a step and of the start-up, in which launch, and when."""

    step_s: float
    startup_s: float
    launch: Launch
    source: str = "measured here now"

    def __str__(self) -> str:
        return f"{self.step_s:.2g} s per step"


def forecast(launch: Launch, pace: Pace, profile: Profile) -> float | None:
    """Seconds that a launch takes, start-up included; None for one that trains no steps.

    Schedules may stop early; their longest is meant. A step with more sequences for each rank takes
    longer in proportion, which is too much where the host is the limit.
    """
    if launch.kind != "trainer" or not launch.steps:
        return None
    more = _per_rank(launch, profile) / _per_rank(pace.launch, profile)
    # A launch that goes on from a checkpoint counts its steps from the run's beginning.
    own = launch.stop.steps if launch.stop else launch.steps - launch.after
    return pace.startup_s + own * pace.step_s * more


def _per_rank(launch: Launch, profile: Profile) -> float:
    """Sequences of a micro-batch that each rank gets."""
    batch = launch.config_overrides.get(_BATCH, profile.workload.global_batch)
    return float(batch) / launch.nproc


def too_long(launch: Launch, seconds: float) -> str:
    """What to change where a launch would not end in time; empty where it would."""
    if seconds <= launch.timeout_s:
        return ""
    name, limit = f"phases.{launch.phase}", duration_text(launch.timeout_s)
    return (
        f"{launch.phase}/{launch.name} would take {duration_text(seconds)}, more than its limit of "
        f"{limit}: raise {name}.timeout_s in a profile, or run fewer steps (--steps-scale)"
    )


class Estimate(NamedTuple):
    """Seconds, if anything is known, and in words where they come from."""

    seconds: float | None
    text: str


class Expected(NamedTuple):
    """Seconds of a launch, in words where they come from; `rough`: nobody measured them here."""

    seconds: float
    source: str
    rough: bool = False


def estimate(launch: Launch, profile: Profile, pace: Pace | None) -> Estimate:
    """The estimate of a launch before the run, never above its time limit."""
    found = expect(launch, profile, pace)
    if found is None:
        told_by_go = profile.plan and launch.kind == "trainer"
        way = " (the rate of a GO tells it)" if told_by_go else ""
        return Estimate(None, f"duration not known yet{way}")
    seconds, source, _ = found
    text = f"about {duration_text(seconds)} ({source})"
    if seconds > launch.timeout_s:
        text = f"{too_long(launch, seconds)} ({source})"
    return Estimate(min(seconds, launch.timeout_s), text)


def expect(launch: Launch, profile: Profile, pace: Pace | None) -> Expected | None:
    """What is expected of a launch by that pace, else by its profile; None where none tells."""
    settings = profile.phases.get(launch.phase)
    if pace and (seconds := forecast(launch, pace, profile)) is not None:
        start = duration_text(pace.startup_s)
        return Expected(seconds, f"{pace} and {start} of start-up, {pace.source}")
    if settings is None or not settings.typical_s:
        return None
    source = "the profile's estimate for its own step counts"
    return Expected(settings.typical_s, source, rough=True)


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
        # One that goes on or is stopped does fewer steps itself than it is told of.
        done = [max((one.steps_done or 0 for one in e.result.ranks), default=0) for e in plain]
        entry = plain[done.index(max(done))] if plain else None
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
