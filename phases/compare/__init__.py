"""Rows that hold throughputs against each other: arms, ranks, nodes, a floor, earlier runs.

Here: where each arm ran, its throughput, and a fault of an optional arm.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nsa.contract import ELSEWHERE, OUT_OF_MEMORY_PREFIX
from phases.kit import CONTROL_LEAST
from phases.kit.case import Case
from phases.kit.commands import INTERLEAVED, launches_per_arm
from phases.kit.finding import (
    Finding,
    ending,
    failed,
    incomplete,
    inconclusive,
    invalid,
    passed,
    skipped,
    warned,
)
from phases.kit.measure import derived, effective_rate
from phases.kit.rows import Row
from phases.training.plausible import differences
from runbook.records import Outcome, Reason
from runbook.records.evidence import LaunchEvidence, TrainingLog
from runbook.stats.arms import complete_rounds, t_quantile
from runbook.stats.throughput import StatisticsError, block_throughputs, effective

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one arm ran: the launch, the arm's name in its CSV (None: the whole launch)."""

    arm: str
    launch: str
    inside: str | None
    round: int


# An arm that ended its launch, or that the trainer refused, and how.
ArmFault = tuple[str, Finding]


def blamed(arm: str, end: Finding) -> ArmFault:
    """The arm with its end, which has a remedy of its own where memory ran out."""
    return arm, replace(end, topic="memory" if end.code is Reason.OUT_OF_MEMORY else "")


def launch_name(arm: str, number: int) -> str:
    """Name of an arm's own launch in round `number`."""
    return f"{arm}_r{number}"


def places(case: Case, arms: Sequence[str]) -> Iterator[Place]:
    """Every place where an arm was planned to run, the interleaved launch once per arm."""
    if case.context.protocol == "blocks":
        for arm in arms:
            yield Place(arm=arm, launch=INTERLEAVED, inside=arm, round=0)
        return
    for number in range(1, launches_per_arm(case.context, case.phase) + 1):
        for arm in arms:
            yield Place(arm=arm, launch=launch_name(arm, number), inside=None, round=number)


def samples(case: Case, arms: Sequence[str]) -> pd.DataFrame:
    """Throughput of each arm in each complete round: columns arm, block, value.

    Raises a finding where a launch has no evidence or no round is complete.
    """
    import pandas as pd

    try:
        if case.context.protocol == "blocks":
            frame = block_throughputs(case.log(INTERLEAVED))
        else:
            rows = [
                (place.arm, place.round, float(effective(case.log(place.launch)).value))
                for place in places(case, arms)
            ]
            frame = pd.DataFrame(rows, columns=["arm", "block", "value"])
    except StatisticsError as error:
        raise incomplete(Reason.TOO_FEW_SAMPLES, str(error)) from error
    missing = [arm for arm in arms if arm not in set(frame["arm"])]
    if missing:
        reason = f"no complete block of arm {', '.join(missing)}"
        raise incomplete(Reason.TOO_FEW_SAMPLES, reason)
    whole, _ = complete_rounds(frame)
    if whole.empty:
        raise incomplete(Reason.TOO_FEW_SAMPLES, "no complete round of all arms")
    return whole


def source_log(case: Case, arms: Sequence[str]) -> TrainingLog:
    """The log that stands for the comparison: the interleaved one, or the first arm's first."""
    return case.log(next(places(case, arms)).launch)


def arm_fault(case: Case, *, optional_arms: Sequence[str]) -> ArmFault | None:
    """The optional arm that ended the launch of all arms or was refused in it; None if none did.

    A launch that ended badly is blamed on the arm whose turn it was, by the rows written. An
    arm that no other arm's block preceded explains nothing: then the launch itself is at fault.
    """
    if INTERLEAVED not in case.evidence.launches:
        return None
    launch = case.launch(INTERLEAVED)
    fault = refused(launch, optional_arms)
    if fault or launch.result.ok:
        return fault
    schedule = launch.launch.schedule
    end = ending(launch)
    if schedule is None or end.outcome is not Outcome.FAIL:
        return None
    # Whose block holds the row after the written ones.
    rows = 0 if launch.training is None else len(launch.training.frame)
    order = [arm for arms in schedule.rounds for arm in arms]
    turn = order[rows // (schedule.steps + schedule.warmup_steps) :][:1]
    if not turn or turn[0] not in optional_arms or turn[0] == order[0]:
        return None
    return blamed(turn[0], end)


def refused(launch: LaunchEvidence, arms: Sequence[str]) -> ArmFault | None:
    """The first of the arms that the trainer refused, by the word of the rank that could not."""
    found = [
        (str(failure.get("error") or "no error recorded"), str(failure["arm"]), rank.path)
        for rank in launch.ranks
        for failure in rank.arm_failures
        if failure.get("arm") in arms
    ]
    if not found:
        return None
    error, arm, path = min(found, key=lambda item: (item[1] != found[0][1], ELSEWHERE in item[0]))
    code = Reason.OUT_OF_MEMORY if error.startswith(OUT_OF_MEMORY_PREFIX) else Reason.CRASH
    return blamed(arm, failed(code, f"arm {arm} failed: {error}", evidence=(path,)))


def dropped(case: Case, row: Row, fault: ArmFault | None) -> Finding | None:
    """What a row says where a fault of an optional arm ended the launch, its own affair.

    Row `completed` says so as a warning, and the others have nothing left to judge. None where the
    trainer went on without the arm.
    """
    if fault is None or all(one.result.ok for one in case.evidence.launches.values()):
        return None
    arm, end = fault
    reason = f"the optional arm {arm} ended the launch ({end.reason})"
    if row.what == "completed":
        return warned(f"{reason}: that arm is dropped", evidence=end.evidence)
    return skipped(end.code, reason, evidence=end.evidence, follows=end.follows)


# Two-sided error of the prediction interval.
_ERROR = 0.01


def reproduces_baseline(
    case: Case, *, launch: str, arm: str | None, but: Sequence[str] = ()
) -> Finding:
    """PASS if the control arm's throughput lies where one more baseline launch would.

    99 % prediction interval of one further launch, on the log scale. `but` as in `differences`.
    """
    if "baseline" not in case.evidence.earlier:
        return skipped(Reason.NOT_ASKED_FOR, "the baseline phase is not part of this run")
    control = effective_rate(case.log(launch), arm=arm)
    if not case.profile.throughput_gated:
        reason = f"control arm {control}; throughput is not gated on profile {case.profile.name}"
        return skipped(Reason.NOT_GATED, reason, measurement=control)
    before = case.earlier("baseline")
    names = list(before.evidence.launches)
    unlike = differences(before.env(names[0]), case.env(launch), but=but)
    paths = (before.launch(names[0]).path("env"), case.launch(launch).path("env"))
    if unlike:
        reason = f"settings differ from the baseline's: {'; '.join(unlike)}"
        return invalid(Reason.NOT_COMPARABLE, reason, evidence=paths)
    launches = [effective_rate(before.log(name)) for name in names]
    rates = [float(rate.value) for rate in launches]
    if len(rates) < 2:
        reason = "one baseline launch has no interval; `--protocol single` cannot check its control"
        return inconclusive(Reason.TOO_FEW_SAMPLES, reason, measurement=control)
    low, high = _prediction_interval(rates)
    value = derived(control, name="control", interval=(low, high), also=launches)
    expected = f"one more baseline launch: {low:.4g} to {high:.4g}"
    reason = f"control {float(control.value):.4g} tok/s, {expected}"
    if low <= float(control.value) <= high:
        return passed(reason, measurement=value, evidence=paths)
    return invalid(Reason.NOT_COMPARABLE, reason, measurement=value, evidence=paths)


def _prediction_interval(rates: Sequence[float]) -> tuple[float, float]:
    """Where one more launch falls in 99 % of cases, at least 5 % to either side."""

    logs = [math.log(rate) for rate in rates]
    count = len(logs)
    mean = sum(logs) / count
    spread = math.sqrt(sum((value - mean) ** 2 for value in logs) / (count - 1))
    reach = t_quantile(_ERROR / 2, count - 1) * spread * math.sqrt(1 + 1 / count)
    half = max(reach, math.log1p(CONTROL_LEAST))
    return math.exp(mean - half), math.exp(mean + half)
