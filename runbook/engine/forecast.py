"""How long launches take on this machine, from steps that were measured here.

A launch takes its start-up and its steps; a step takes as long as its share of the batch for each
rank. Pure: who measures gives a `Pace`, who plans asks for seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runbook.config.profile import Profile
from runbook.records import Launch
from runbook.records.measurement import duration_text

_BATCH = "train.batch_size"


@dataclass(frozen=True, kw_only=True)
class Pace:
    """What was measured: seconds of a step and of the start-up, and in which launch."""

    step_s: float
    startup_s: float
    launch: Launch

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
    return pace.startup_s + launch.steps * pace.step_s * more


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


def remaining(launches: Sequence[Launch], pace: Pace, profile: Profile) -> tuple[float, int]:
    """Seconds of all these launches together, and how many of them nothing is known of."""
    seconds = [forecast(launch, pace, profile) for launch in launches]
    return sum(one for one in seconds if one is not None), seconds.count(None)
