"""Row `goodput`: what became of the time between a launch's first start and its end.

    wall time = steps + pauses + starting + lost + waiting

A step counts if the weights at the end came from it. Its time is `dt_s`, by the trainer's monotonic
clock. What lies around it is the difference to the ranks' times of day, and the rest to what the
harness's monotonic clock saw: where clocks disagree, a part is below zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from phases.kit.case import Case
from phases.kit.finding import Finding, inconclusive, missing, skipped
from phases.kit.measure import derived, log_value
from runbook.records import Reason
from runbook.records.evidence import LaunchEvidence, SetAside
from runbook.records.measurement import duration_text

# Starts are written to the second.
_START_S = 1.0
# Of the wall time, what clocks of one machine may differ by.
_CLOCKS = 0.01
# Of each part that is a difference of two clocks' times, what it says when it is below zero.
_NEGATIVE = {
    "pauses": "the steps' own times are longer than the time that they took",
    "starting": "the ranks' clocks show more time than the harness saw",
    "lost": "the last word of a start that was cut off is before its first step",
}


@dataclass
class Time:
    """Seconds of a launch by what became of them.

    `steps` and `pauses` (evaluations, checkpoints) led to the weights at the end. `starting` is
    until the first step ended, that step included, and from the last one to the end. `lost` is
    all other training, and the time until its end was noticed. In `waiting` nothing ran.
    """

    steps: float = 0.0
    pauses: float = 0.0
    starting: float = 0.0
    lost: float = 0.0
    waiting: float = 0.0
    wall: float = 0.0
    starts: int = 0
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        parts = ("steps", "pauses", "starting", "lost", "waiting")
        told = ", ".join(f"{name} {duration_text(getattr(self, name))}" for name in parts)
        return f"{told} of {duration_text(self.wall)} in {self.starts} start(s)"


def goodput(case: Case, names: Sequence[str]) -> Finding:
    """Shown: the share of the wall time that went into steps which count."""
    legs = [case.completed(name) for name in names]
    time = time_of(legs)
    share = time.steps / time.wall
    logs = [log_value(case.log(name), "goodput", share, "") for name in names]
    value = derived(logs[-1], name="goodput", value=share, unit="", also=logs)
    folders = [one.folder for leg in legs for one in leg.aside]
    if time.wrong:
        text = f"{time}: {'; '.join(time.wrong)}"
        return inconclusive(Reason.UNDECIDED, text, measurement=value, evidence=folders)
    return skipped(
        Reason.NOT_GATED, f"{time}; shown, not gated", measurement=value, evidence=folders
    )


def time_of(legs: Sequence[LaunchEvidence]) -> Time:
    """The time of finished launches, each of which goes on from the one before.

    Raises a finding where one has no step.
    """
    time = Time()
    aside = {one.folder: one for leg in legs for one in leg.aside}
    begins = [datetime.fromisoformat(leg.result.started_at).timestamp() for leg in legs]
    ends = [begin + leg.result.duration_s for leg, begin in zip(legs, begins, strict=True)]
    for number, leg in enumerate(legs):
        _count(time, leg, kept=min((one.after for one in legs[number + 1 :]), default=None))
    for one in aside.values():
        _count_lost(time, one)
    spans = sorted(
        [*zip(begins, ends, strict=True), *((one.began, one.ended) for one in aside.values())]
    )
    time.starts = len(spans)
    time.wall = max(ends) - spans[0][0]
    reached = spans[0][1]
    for begin, end in spans[1:]:
        if begin < reached - _START_S:
            time.wrong.append("two starts of it ran at once, or a clock was set back")
        time.waiting += max(0.0, begin - reached)
        reached = max(reached, end)
    for name, why in _NEGATIVE.items():
        if getattr(time, name) < -(_CLOCKS * time.wall + _START_S):
            time.wrong.append(why)
    return time


def _count(time: Time, leg: LaunchEvidence, *, kept: int | None) -> None:
    """A leg that finished; of its steps those beyond `kept` were trained again by a later one."""
    marks = leg.ranks[0].steps if leg.ranks else None
    if leg.training is None or marks is None or marks.empty:
        raise missing(f"{leg.launch.name} has no step", leg.launch.run_dir)
    rows = leg.training.frame.iloc[1:]
    counts = rows["step"] <= kept if kept is not None else rows["step"] > 0
    trained = float(marks["ts"].iloc[-1] - marks["ts"].iloc[0])
    time.steps += float(rows["dt_s"][counts].sum())
    time.lost += float(rows["dt_s"][~counts].sum())
    time.pauses += trained - float(rows["dt_s"].sum())
    time.starting += leg.result.duration_s - trained


def _count_lost(time: Time, one: SetAside) -> None:
    first = one.ended if one.first_step is None else one.first_step
    time.starting += first - one.began
    time.lost += one.ended - first
