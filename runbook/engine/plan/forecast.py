"""How long launches take on this machine: from steps that were measured, earlier runs, the profile.

A launch takes its start-up and its steps; a step takes as long as its share of the batch for each
rank. Only for estimates: a run that cannot be read is no ground for one, and `runbook report` says
what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from nsa.contract import TRAINING_CSV
from runbook.config.profile import Profile
from runbook.engine.earlier import ground_of
from runbook.errors import RunbookError
from runbook.folder import run_folders
from runbook.folder.integrity import go_record
from runbook.folder.launch.evidence import read_training_csv
from runbook.folder.manifest import load_record
from runbook.machine.host import count_cpus
from runbook.records import Launch, RunRecord
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


class Estimator:
    """Estimates, launch by launch, from steps measured here, earlier runs, or the profile."""

    def __init__(self, profile: Profile, earlier: Earlier, *, pace: Pace | None = None) -> None:
        self.pace = pace
        self._profile, self._earlier = profile, earlier

    def estimate(self, launch: Launch) -> Estimate:
        """The estimate of a launch before the run, never above its time limit."""
        found = self.expect(launch)
        if found is None:
            told_by_go = self._profile.plan and launch.kind == "trainer"
            way = " (the rate of a GO tells it)" if told_by_go else ""
            return Estimate(None, f"duration not known yet{way}")
        seconds, source, _ = found
        text = f"about {duration_text(seconds)} ({source})"
        if seconds > launch.timeout_s:
            text = f"{too_long(launch, seconds)} ({source})"
        return Estimate(min(seconds, launch.timeout_s), text)

    def expect(self, launch: Launch) -> Expected | None:
        """What is expected of a launch; None where nothing is known.

        An earlier run knows all of a launch; the pace of the first steps, its steps only.
        """
        if found := self._earlier.launch(launch):
            return Expected(found[0], f"as in run {found[1]}")
        pace, settings = self.pace, self._profile.phases.get(launch.phase)
        if pace and (seconds := forecast(launch, pace, self._profile)) is not None:
            start = duration_text(pace.startup_s)
            source = f"{pace} and {start} of start-up, {pace.source}"
            return Expected(seconds, source)
        if settings is None or not settings.typical_s:
            return None
        source = "the profile's estimate for its own step counts"
        return Expected(settings.typical_s, source, rough=True)


# Of runs of one phase only, the newest may know nothing of the launch that is asked for.
_MOST_RUNS = 5


class Earlier:
    """Looks into run folders only when asked, and no further than needed."""

    def __init__(self, profile: str, out_dir: Path, *, without: str = "") -> None:
        self._kept: list[RunRecord] = []
        self._more = _newest_first(profile, out_dir, without)

    def launch(self, launch: Launch) -> tuple[float, str] | None:
        """Seconds of the same launch with as many steps, where it finished, and the run's id."""
        for record in self._records():
            for phase in record.phases:
                for entry in phase.launches:
                    then, result = entry.launch, entry.result
                    same = (then.phase, then.name) == (launch.phase, launch.name)
                    if same and then.steps == launch.steps and result.ok and result.duration_s > 0:
                        return result.duration_s, record.run_id
        return None

    def _records(self) -> Iterator[RunRecord]:
        yield from self._kept
        while (record := next(self._more, None)) is not None:
            self._kept.append(record)
            yield record


def _newest_first(profile: str, out_dir: Path, without: str) -> Iterator[RunRecord]:
    found = 0
    for folder in reversed(run_folders(out_dir)):
        if folder.name == without or found == _MOST_RUNS:
            continue
        try:
            record = load_record(folder)
        except RunbookError:
            continue
        # As far as a record tells: a run folder may have been copied from another machine.
        cpus = str(count_cpus())
        if record.profile == profile and record.environment.get("cpu.count", cpus) == cpus:
            found += 1
            yield record


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
