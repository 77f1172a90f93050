"""An observer in front of another that says how far the whole run is, and how long the rest takes.

What the profile says comes first, then the first steps of this run: a launch takes its start-up and
its steps, a step as long as its share of the batch for each rank. A planned launch that would
exceed its own time limit is named at once, with the setting to change. A run that cannot be read is
no ground for an estimate; `runbook report` says what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from nsa.contract import TRAINING_CSV
from runbook.config import Profile
from runbook.config.setup import Setup
from runbook.engine.earlier import ground_of
from runbook.errors import RunbookError
from runbook.folder.launch.evidence import read_training_csv
from runbook.folder.manifest import go_record
from runbook.launch.observer import Forecast, Observer, Pulse
from runbook.records import Launch, LaunchResult, PhaseRecord
from runbook.records.measurement import duration_text

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
    """Seconds of a launch, if anything is known, and in words where they come from.

    `rough`: nobody measured them here.
    """

    seconds: float | None
    text: str
    rough: bool = False


def estimate(launch: Launch, profile: Profile, pace: Pace | None) -> Estimate:
    """The estimate of a launch before the run, never above its time limit."""
    seconds, source, rough = expect(launch, profile, pace)
    if seconds is None:
        told_by_go = profile.plan and launch.kind == "trainer"
        way = " (the rate of a GO tells it)" if told_by_go else ""
        return Estimate(None, f"duration not known yet{way}")
    text = too_long(launch, seconds) or f"about {duration_text(seconds)}"
    return Estimate(min(seconds, launch.timeout_s), f"{text} ({source})", rough)


def expect(launch: Launch, profile: Profile, pace: Pace | None) -> Estimate:
    """What is expected of a launch by that pace, else by its profile."""
    if pace and (seconds := forecast(launch, pace, profile)) is not None:
        start = duration_text(pace.startup_s)
        return Estimate(seconds, f"{pace} and {start} of start-up, {pace.source}")
    settings = profile.phases.get(launch.phase)
    typical_s = settings.typical_s if settings else None
    return Estimate(typical_s, "the profile's estimate for its own step counts", rough=True)


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
        entry = max(plain, key=lambda one: one.result.steps_done, default=None)
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


# Enough steps and time for a clock that looks ten times a second.
_FEWEST_STEPS = 5
_LEAST_S = 1.0
_TELL_EVERY_S = 1.0


class Forecaster(Observer):
    """Passes every event on, and adds `run_forecast` and notes.

    `planned` are all launches of the run in their order, those of phases that had ended before a
    resume left out; `done_s` is what these phases took. `pace` is that of an earlier run, which
    holds until this one has been measured.
    """

    def __init__(
        self,
        inner: Observer,
        planned: Sequence[Launch],
        profile: Profile,
        *,
        done_s: float = 0.0,
        pace: Pace | None = None,
    ) -> None:
        self._inner, self._profile = inner, profile
        for name in ("phase_started", "run_forecast", "run_finished", "note"):
            setattr(self, name, getattr(inner, name))
        self._left = {(launch.phase, launch.name): launch for launch in planned}
        self._count = max(1, len(self._left))
        self._pace, self._measured = pace, False
        self._done_s, self._share, self._told_at = done_s, 0.0, -_TELL_EVERY_S
        self._run_began = monotonic()
        self._running: Launch | None = None
        self._began = 0.0
        self._first: tuple[int, float] | None = None
        self._last: tuple[int, float] = (0, 0.0)
        self._goal = 0
        self._startup_s: float | None = None

    # -- what is heard -----------------------------------------------------------------------------

    def run_started(self, run_id: str, run_root: str, phases: tuple[str, ...]) -> None:
        """The first forecast, from the profile alone."""
        self._inner.run_started(run_id, run_root, phases)
        self._tell()

    def launch_started(self, launch: Launch, attempt: int) -> None:
        """A new clock for each attempt."""
        self._began, self._first, self._startup_s = monotonic(), None, None
        self._running, self._last, self._goal = launch, (0, self._began), launch.steps
        self._inner.launch_started(launch, attempt)

    def launch_progress(
        self, launch: Launch, step: int, total: int, toks_per_s: float | None
    ) -> None:
        """Take the pace of the launch, and of the first one for those that follow."""
        self._inner.launch_progress(launch, step, total, toks_per_s)
        if launch.kind == "trainer":
            self._measure(launch, step, total)

    def launch_ranks(self, launch: Launch, pulse: Pulse) -> None:
        """Tell the forecast again from time to time."""
        self._inner.launch_ranks(launch, pulse)
        if monotonic() >= self._told_at + _TELL_EVERY_S:
            self._tell()

    def launch_finished(self, launch: Launch, result: LaunchResult) -> None:
        """It is no longer left."""
        self._left.pop((launch.phase, launch.name), None)
        self._running = None
        self._inner.launch_finished(launch, result)
        self._tell()

    def phase_finished(self, record: PhaseRecord) -> None:
        """What is left after a phase; launches that were not started are not."""
        self._left = {key: one for key, one in self._left.items() if key[0] != record.name}
        self._inner.phase_finished(record)
        self._tell()

    # -- what is measured --------------------------------------------------------------------------

    def _measure(self, launch: Launch, step: int, total: int) -> None:
        now = monotonic()
        if step >= 1 and self._startup_s is None:
            self._startup_s = now - self._began
            # The first step that is seen of one that goes on from a checkpoint is not its first.
            self._goal = min(total, step - 1 + launch.stop.steps) if launch.stop else total
        if step <= SKIPPED:
            return
        self._first = self._first or (step, now)
        self._last = (step, now)
        if not self._measured and (step_s := self._step_s()) is not None:
            self._take(launch, step_s)

    def _step_s(self) -> float | None:
        """Seconds of a step of the running launch, until its last one: a hang changes nothing."""
        if self._first is None:
            return None
        steps, seconds = self._last[0] - self._first[0], self._last[1] - self._first[1]
        return seconds / steps if steps >= _FEWEST_STEPS and seconds >= _LEAST_S else None

    def _take(self, launch: Launch, step_s: float) -> None:
        pace = Pace(step_s=step_s, startup_s=self._startup_s or 0.0, launch=launch)
        self._pace, self._measured = pace, True
        self._tell()
        for planned in self._left.values():
            seconds = forecast(planned, pace, self._profile)
            if seconds is not None and (text := too_long(planned, seconds)):
                self._inner.note(f"{text} ({pace})")

    # -- what is told ------------------------------------------------------------------------------

    def _tell(self) -> None:
        now = self._told_at = monotonic()
        every = [(one, expect(one, self._profile, self._pace)) for one in self._left.values()]
        known = [(one, found) for one, found in every if found.seconds is not None]
        unknown = len(every) - len(known)
        left_s = sum(self._still(one, found.seconds or 0.0, now) for one, found in known)
        done_s = self._done_s + now - self._run_began
        whole = sum(found.seconds or 0.0 for _, found in known)
        guess = unknown * whole / len(known) if known else 0.0
        if known or not self._left:
            share = done_s / max(done_s + left_s + guess, 1e-9)
        else:
            share = 1.0 - len(self._left) / self._count
        # Never back: a bar that shrinks tells nobody anything.
        self._share = max(self._share, min(1.0, share))
        self._inner.run_forecast(
            Forecast(
                done_s=done_s,
                share=self._share,
                left_s=left_s if known or not self._left else None,
                unknown=unknown,
                source=next((found.text for _, found in known), ""),
                rough=any(found.rough for _, found in known),
            )
        )

    def _still(self, launch: Launch, expected_s: float, now: float) -> float:
        """Seconds that it takes from now on; one that runs, by its own pace once that is known."""
        if launch != self._running:
            return expected_s
        step_s, steps = self._step_s(), max(0, self._goal - self._last[0])
        return max(0.0, expected_s - now + self._began) if step_s is None else steps * step_s
