"""Numbers of two runs: throughput with a decision, everything else with what was recorded of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from runbook.folder.launch.shapes import is_number
from runbook.records import Check, LaunchStatus, Measurement
from runbook.records.evidence import LaunchEvidence
from runbook.stats.decision import Decided, Decision
from runbook.stats.levels import allowance_of, loss_shown
from runbook.stats.throughput import StatisticsError, effective
from runbook.tools.compare.sides import Side

_NOT_IN_TURN = "not launched in turn: a change of the machine in between counts too"


@dataclass(frozen=True, kw_only=True)
class SpeedChange:
    """Throughput of one phase's launches on both sides, in tok/s, and the decision if any.

    `ratio` is B / A; `says` one of slower, faster, suspected, within noise and not decided.
    """

    phase: str
    launches: tuple[str, ...]
    a: tuple[float, ...]
    b: tuple[float, ...]
    ratio: float
    decision: Decision | None
    says: str
    note: str


@dataclass(frozen=True, kw_only=True)
class MetricChange:
    """A check's number on both sides; `difference` is B - A, `interval` its bounds.

    `says`: equal; within noise or differs, where both runs recorded an interval; else no interval.
    """

    id: str
    unit: str
    a: float
    b: float
    difference: float
    interval: tuple[float, float] | None
    says: str


def speed_changes(a: Side, b: Side, *, comparable: bool) -> list[SpeedChange]:
    """One row for each phase whose launches gave a throughput on both sides."""
    phases: dict[str, list[tuple[str, float, float]]] = {}
    for (phase, name), left in a.launches.items():
        right = b.launches.get((phase, name))
        if right is None or left.launch.schedule or right.launch.schedule:
            continue
        pair = _throughput(left), _throughput(right)
        if pair[0] is not None and pair[1] is not None:
            phases.setdefault(phase, []).append((name, pair[0], pair[1]))
    device = _device(a)
    return [_speed(phase, rows, device if comparable else "") for phase, rows in phases.items()]


def _device(side: Side) -> str:
    """The type of device of the runs; they are comparable, so it is that of every launch."""
    kinds = {str((one.env or {}).get("device", {}).get("type")) for one in side.launches.values()}
    return kinds.pop() if len(kinds) == 1 else "cpu"


def _throughput(evidence: LaunchEvidence) -> float | None:
    log = evidence.training
    if log is None or log.damaged or evidence.result.status is not LaunchStatus.COMPLETED:
        return None
    try:
        value = float(effective(log).value)
    except StatisticsError:
        return None
    return value if 0.0 < value < math.inf else None


def _speed(phase: str, rows: list[tuple[str, float, float]], device: str) -> SpeedChange:
    names, a, b = zip(*rows, strict=True)
    ratio = math.exp(sum(math.log(y / x) for x, y in zip(a, b, strict=True)) / len(rows))
    decision: Decision | None = None
    says, note = "not decided", "the runs are not comparable"
    if device:
        allowance = allowance_of(device)
        decision = loss_shown(a, b, allowance=allowance)
        says = _words(decision, loss_shown(b, a, allowance=allowance))
        note = f"{allowance:.0%} is what two runs on a {device} may differ by; {_NOT_IN_TURN}"
    return SpeedChange(
        phase=phase, launches=names, a=a, b=b, ratio=ratio, decision=decision, says=says, note=note
    )


def _words(loss: Decision, gain: Decision) -> str:
    if loss.outcome is Decided.FAIL:
        return "slower"
    if gain.outcome is Decided.FAIL:
        return "faster"
    return "suspected" if loss.outcome is Decided.INCONCLUSIVE else "within noise"


def metric_change(a: Check, b: Check) -> MetricChange | None:
    """The numbers of one check on both sides; None if one has none, or another unit."""
    left, right = a.measurement, b.measurement
    if left is None or right is None or left.unit != right.unit:
        return None
    if not (is_number(left.value) and is_number(right.value)):
        return None
    before, now = float(left.value), float(right.value)
    interval = _difference_interval(left, right)
    if before == now:
        says = "equal"
    elif interval is None:
        says = "no interval"
    else:
        says = "within noise" if interval[0] <= 0.0 <= interval[1] else "differs"
    return MetricChange(
        id=a.id,
        unit=left.unit,
        a=before,
        b=now,
        difference=now - before,
        interval=interval,
        says=says,
    )


def _difference_interval(a: Measurement, b: Measurement) -> tuple[float, float] | None:
    """Bounds of B - A from the interval of each (MOVER: the distances add up as squares).

    None where a run recorded no interval, or one that does not hold its own value.
    """
    if a.interval is None or b.interval is None:
        return None
    x, y = float(a.value), float(b.value)
    if not (a.interval[0] <= x <= a.interval[1] and b.interval[0] <= y <= b.interval[1]):
        return None
    down = math.hypot(y - b.interval[0], a.interval[1] - x)
    up = math.hypot(b.interval[1] - y, x - a.interval[0])
    return y - x - down, y - x + up
