"""Two sides of a comparison: what differs, whether one cause can be named, and their numbers.

Throughput is compared with a decision, everything else with what was recorded of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from runbook.engine.intact import doubt, untrusted
from runbook.folder import RECORD_FILE
from runbook.folder.facts import Difference, Facts, device_facts, env_facts, unlike
from runbook.folder.launch.evidence import read_launch
from runbook.records import LaunchStatus, PhaseRecord, RunRecord
from runbook.records.evidence import LaunchEvidence
from runbook.stats.decision import Decided, Decision
from runbook.stats.launches import allowance_of, loss_shown
from runbook.stats.throughput import StatisticsError, effective

_CAUSES = ("code", "machine", "software", "toggles")


@dataclass(frozen=True, kw_only=True)
class Side:
    """One run with what its trainer launches left, by phase and launch name.

    `doubt`: why its run.json is not believed; then its verdict is not repeated.
    """

    record: RunRecord
    doubt: str
    launches: Mapping[tuple[str, str], LaunchEvidence]


def read_side(record: RunRecord, folder: Path) -> Side:
    """Read the trainer launches of a run. Raises OSError if the disk cannot be read."""
    launches = {
        (phase.name, entry.launch.name): read_launch(folder, entry.launch, entry.result)
        for phase in record.phases
        for entry in phase.launches
        if entry.launch.kind in ("trainer", "own")
    }
    why = doubt(folder, record)
    told = untrusted(record, why) if why else record
    return Side(record=told, doubt=why, launches=launches)


def phases_run(record: RunRecord) -> dict[str, PhaseRecord]:
    """The phases that were started, by name; the others have rows that only say so."""
    return {phase.name: phase for phase in record.phases if phase.started_at or phase.launches}


def differences(a: Side, b: Side) -> list[Difference]:
    """Everything about the two runs that differs, each once, with the launches it is seen in."""
    found = unlike(_record_facts(a.record), _record_facts(b.record), absent="unset")
    seen: dict[Difference, list[str]] = {}
    for name in common_launches(a, b):
        left, right = (_launch_facts(side.launches[name]) for side in (a, b))
        if left is not None and right is not None:
            for one in unlike(left, right):
                seen.setdefault(one, []).append("/".join(name))
    for one, where in seen.items():
        place = where[0] if len(where) == 1 else f"{len(where)} launches"
        found.append(replace(one, what=f"{one.what} ({place})"))
    return found


def _launch_facts(launch: LaunchEvidence) -> Facts | None:
    return (
        None if launch.env is None else env_facts(launch.env) | device_facts(launch.devices_before)
    )


def _record_facts(record: RunRecord) -> Facts:
    facts = {
        ("work", "profile"): record.profile,
        ("work", "profile digest"): record.profile_sha256[:12],
        ("harness", "runbook"): record.tool_version,
    }
    for name, value in sorted(record.settings.items()):
        kind = "toggles" if name.startswith(("NSA_", "NCCL_", "TORCH_")) else "work"
        facts[kind, name] = value
    return facts


def common_launches(a: Side, b: Side) -> list[tuple[str, str]]:
    """Phase and name of the launches of both runs."""
    return [name for name in a.launches if name in b.launches]


def obstacles(a: Side, b: Side, found: list[Difference]) -> list[str]:
    """Why a difference in the numbers could not be ascribed to one cause; empty if it can."""
    reasons = [
        f"not the same work and limits: {one.what}: {one.a} against {one.b}"
        for one in found
        if one.kind == "work"
    ]
    causes = [kind for kind in _CAUSES if any(one.kind == kind for one in found)]
    if len(causes) > 1:
        reasons.append(f"more than one thing differs: {', '.join(causes)}")
    common = common_launches(a, b)
    if not common:
        reasons.append("the runs have no trainer launch in common")
    blind = [
        "/".join(name)
        for name in common
        if a.launches[name].env is None or b.launches[name].env is None
    ]
    if blind:
        reasons.append(f"no env.json on both sides for: {', '.join(blind)}")
    for side in (a, b):
        if side.doubt:
            reasons.append(
                f"{RECORD_FILE} of {side.record.run_id} {side.doubt}: "
                f"see runbook verify {side.record.run_id}"
            )
        if side.record.interrupted or side.record.finished_at is None:
            reasons.append(f"run {side.record.run_id} did not complete")
    return reasons


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
