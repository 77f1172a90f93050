"""Two finished runs side by side: what differs, which checks changed, and whether B is slower."""

from __future__ import annotations

import math
from pathlib import Path

from runbook.compare.sides import Side, differences, obstacles, read_side
from runbook.compare.types import CheckChange, Comparison, SpeedChange
from runbook.decide import Decision, regression
from runbook.evidence import LaunchEvidence
from runbook.records import Check, LaunchStatus, RunRecord
from runbook.stats import StatisticsError, effective

__all__ = ["compare_runs"]

_FEWEST_LAUNCHES = 3
_NOT_IN_TURN = "the runs were not launched in turn: a change of the machine in between counts too"


def compare_runs(a: RunRecord, a_folder: Path, b: RunRecord, b_folder: Path) -> Comparison:
    """Compare run B with the reference A. Raises OSError if a folder cannot be read."""
    left, right = read_side(a, a_folder), read_side(b, b_folder)
    found = differences(left, right)
    reasons = obstacles(left, right, found)
    return Comparison(
        a=a.run_id,
        b=b.run_id,
        a_verdict=a.verdict.value,
        b_verdict=b.verdict.value,
        differences=tuple(found),
        obstacles=tuple(reasons),
        checks=tuple(_check_changes(a, b)),
        speeds=tuple(_speeds(left, right, comparable=not reasons)),
    )


def _check_changes(a: RunRecord, b: RunRecord) -> list[CheckChange]:
    left = {check.id: check for check in a.checks()}
    right = {check.id: check for check in b.checks()}
    required = {*a.required, *b.required}
    names = dict.fromkeys([*left, *right, *a.required, *b.required])
    return [
        CheckChange(
            id=name,
            required=name in required,
            a=_outcome(left.get(name)),
            b=_outcome(right.get(name)),
            a_value=_value(left.get(name)),
            b_value=_value(right.get(name)),
        )
        for name in names
    ]


def _outcome(check: Check | None) -> str:
    return check.outcome.value if check else ""


def _value(check: Check | None) -> str:
    return str(check.measurement) if check and check.measurement else ""


def _speeds(a: Side, b: Side, *, comparable: bool) -> list[SpeedChange]:
    """One row for each phase whose launches gave a throughput on both sides."""
    phases: dict[str, list[tuple[str, float, float]]] = {}
    for (phase, name), left in a.launches.items():
        right = b.launches.get((phase, name))
        if right is None or left.launch.schedule or right.launch.schedule:
            continue
        pair = _throughput(left), _throughput(right)
        if pair[0] is not None and pair[1] is not None:
            phases.setdefault(phase, []).append((name, pair[0], pair[1]))
    return [_speed(phase, rows, comparable=comparable) for phase, rows in phases.items()]


def _throughput(evidence: LaunchEvidence) -> float | None:
    log = evidence.training
    if log is None or log.damaged or evidence.result.status is not LaunchStatus.COMPLETED:
        return None
    try:
        return float(effective(log).value)
    except StatisticsError:
        return None


def _speed(phase: str, rows: list[tuple[str, float, float]], *, comparable: bool) -> SpeedChange:
    names, a, b = zip(*rows, strict=True)
    ratio = math.exp(sum(math.log(y / x) for x, y in zip(a, b, strict=True)) / len(rows))
    decision: Decision | None = None
    note = _NOT_IN_TURN
    if not comparable:
        note = "not decided: the runs are not comparable"
    elif len(rows) < _FEWEST_LAUNCHES:
        note = f"not decided: {len(rows)} launches, {_FEWEST_LAUNCHES} are needed"
    else:
        decision = regression(a, b)
    return SpeedChange(
        phase=phase, launches=names, a=a, b=b, ratio=ratio, decision=decision, note=note
    )
