"""How long launches take on this machine, from steps that were measured here.

A launch takes its start-up and its steps; a step takes as long as its share of the batch for each
rank. Pure: who measures gives a `Pace`, who plans asks for seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from runbook.config.page import limits_of
from runbook.config.profile import Profile
from runbook.engine.earlier import Earlier
from runbook.records import Launch
from runbook.records.measurement import duration_text

_BATCH = "train.batch_size"
_THROUGHPUT_LIMIT = "throughput"


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
    return pace.startup_s + (launch.steps - launch.after) * pace.step_s * more


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


_Found = tuple[float, str] | None


class Estimator:
    """Estimates, launch by launch, from steps measured here, earlier runs, or the profile.

    `hint`: what a person can do where nothing is known of a trainer's launch.
    """

    def __init__(
        self, profile: Profile, earlier: Earlier, *, pace: Pace | None = None, hint: str = ""
    ) -> None:
        self.pace = pace
        self._profile, self._earlier, self._hint = profile, earlier, hint

    def estimate(self, launch: Launch) -> Estimate:
        """The estimate of a launch before the run, never above its time limit.

        Steps that were measured now come first; where nothing else is known, the floor that the
        profile sets.
        """
        found = (
            self._measured(launch)
            or self._as_before(launch)
            or self._by_profile(launch)
            or self._at_floor(launch)
        )
        if found is None:
            hint = f" ({self._hint})" if self._hint and launch.kind == "trainer" else ""
            return Estimate(None, f"duration not known yet{hint}")
        seconds, source = found
        text = f"about {duration_text(seconds)} ({source})"
        if seconds > launch.timeout_s:
            text = f"{too_long(launch, seconds)} ({source})"
        return Estimate(min(seconds, launch.timeout_s), text)

    def expect(self, launch: Launch) -> _Found:
        """Seconds and their source while a run goes on; None where only the floor would be known.

        An earlier run knows all of a launch; the pace of the first steps, its steps only.
        """
        return self._as_before(launch) or self._measured(launch) or self._by_profile(launch)

    def _measured(self, launch: Launch) -> _Found:
        seconds = forecast(launch, self.pace, self._profile) if self.pace else None
        if seconds is None or self.pace is None:
            return None
        start = duration_text(self.pace.startup_s)
        return seconds, f"{self.pace} and {start} of start-up, {self.pace.source}"

    def _as_before(self, launch: Launch) -> _Found:
        found = self._earlier.launch(launch)
        return (found[0], f"as in run {found[1]}") if found else None

    def _by_profile(self, launch: Launch) -> _Found:
        settings = self._profile.phases.get(launch.phase)
        typical = settings.typical_s if settings else None
        return (typical, "the profile's estimate for its own step counts") if typical else None

    def _at_floor(self, launch: Launch) -> _Found:
        found = (one for one in limits_of(self._profile) if one.spec.name == _THROUGHPUT_LIMIT)
        limit = next(found, None)
        gated = self._profile.throughput_gated and limit is not None and limit.gated
        if launch.kind != "trainer" or limit is None or not gated or not launch.steps:
            return None
        steps = launch.steps - launch.after
        seconds = steps * self._profile.workload.tokens_per_step / limit.value
        if seconds > launch.timeout_s:
            return None  # so slow that it would be stopped: no pace that anybody expects
        return seconds, f"at the floor of {limit.value:g} {limit.spec.unit}"
