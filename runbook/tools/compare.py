"""Two finished runs: what differs, whether their numbers may be compared, and what changed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from runbook.read import read_launch
from runbook.records import LaunchStatus, Outcome, RunRecord
from runbook.records.evidence import LaunchEvidence
from runbook.records.measurement import json_ready, plain_number
from runbook.stats import Decided, Decision, StatisticsError, effective, regression


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Something that is not the same on both sides.

    `kind` groups what changes together: code, machine, software, work (profile, config, data
    shapes), toggles or harness. Numbers may be compared only if one kind differs, and not work.
    """

    kind: str
    what: str
    a: str
    b: str


@dataclass(frozen=True, kw_only=True)
class CheckChange:
    """One check on both sides; an absent side is an empty outcome. `worse`: it passed in A only."""

    id: str
    required: bool
    a: str
    b: str
    a_value: str
    b_value: str
    worse: bool

    @property
    def changed(self) -> bool:
        """True if the outcome is another."""
        return self.a != self.b


@dataclass(frozen=True, kw_only=True)
class SpeedChange:
    """Throughput of one phase's launches on both sides, in tok/s, and the decision if any."""

    phase: str
    launches: tuple[str, ...]
    a: tuple[float, ...]
    b: tuple[float, ...]
    ratio: float
    decision: Decision | None
    note: str


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Run A (the reference) against run B."""

    a: str
    b: str
    a_verdict: str
    b_verdict: str
    differences: tuple[Difference, ...]
    obstacles: tuple[str, ...]
    checks: tuple[CheckChange, ...]
    speeds: tuple[SpeedChange, ...]

    @property
    def comparable(self) -> bool:
        """True if a difference in the numbers can be ascribed to one cause."""
        return not self.obstacles

    @property
    def exit_code(self) -> int:
        """0 nothing is worse, 1 a required check or the speed is, 3 it cannot be said."""
        if not self.comparable:
            return 3
        outcomes = {one.decision.outcome for one in self.speeds if one.decision}
        if Decided.FAIL in outcomes or any(check.worse and check.required for check in self.checks):
            return 1
        return 3 if Decided.INCONCLUSIVE in outcomes else 0

    def document(self) -> dict[str, Any]:
        """For `runbook compare --json`; NaN and infinities become words."""
        found: dict[str, Any] = json_ready(asdict(self))
        head = {"schema_version": 1, "exit_code": self.exit_code, "comparable": self.comparable}
        return {**head, **found}


_KINDS = {"git": "code", "versions": "software", "device": "machine"}
_WORK = ("seq_len", "global_batch", "accumulation", "dtype", "attention_path")
_CAUSES = ("code", "machine", "software", "toggles")
# What something is, by its kind and its name.
_Facts = dict[tuple[str, str], str]


@dataclass(frozen=True, kw_only=True)
class Side:
    """One run with what its trainer launches left, by phase and launch name."""

    record: RunRecord
    launches: Mapping[tuple[str, str], LaunchEvidence]


def read_side(record: RunRecord, folder: Path) -> Side:
    """Read the trainer launches of a run. Raises OSError if the disk cannot be read."""
    launches = {
        (phase.name, entry.launch.name): read_launch(folder, entry.launch, entry.result)
        for phase in record.phases
        for entry in phase.launches
        if entry.launch.kind == "trainer"
    }
    return Side(record=record, launches=launches)


def differences(a: Side, b: Side) -> list[Difference]:
    """Everything about the two runs that differs, each once, with the launches it is seen in."""
    found = _unlike(_record_facts(a.record), _record_facts(b.record), absent="unset")
    seen: dict[Difference, list[str]] = {}
    for name in _common(a, b):
        left, right = a.launches[name].env, b.launches[name].env
        if left is not None and right is not None:
            for one in _unlike(_env_facts(left), _env_facts(right), absent="absent"):
                seen.setdefault(one, []).append("/".join(name))
    for one, where in seen.items():
        place = where[0] if len(where) == 1 else f"{len(where)} launches"
        found.append(replace(one, what=f"{one.what} ({place})"))
    return found


def _unlike(a: _Facts, b: _Facts, *, absent: str) -> list[Difference]:
    values = {fact: (a.get(fact, absent), b.get(fact, absent)) for fact in {**a, **b}}
    return [
        Difference(kind=kind, what=what, a=left, b=right)
        for (kind, what), (left, right) in values.items()
        if left != right
    ]


def _record_facts(record: RunRecord) -> _Facts:
    facts = {
        ("work", "profile"): record.profile,
        ("work", "profile digest"): record.profile_sha256[:12],
        ("harness", "runbook"): record.tool_version,
    }
    for name, value in sorted(record.settings.items()):
        kind = "toggles" if name.startswith(("NSA_", "NCCL_", "TORCH_")) else "work"
        facts[kind, name] = value
    return facts


def _common(a: Side, b: Side) -> list[tuple[str, str]]:
    return [name for name in a.launches if name in b.launches]


def _env_facts(env: Mapping[str, Any]) -> _Facts:
    facts: _Facts = {}
    for name, kind in _KINDS.items():
        # The branch is only a name for the commit.
        inner = {key: v for key, v in _mapping(env.get(name)).items() if key != "branch"}
        facts |= {(kind, f"{name}.{key}"): str(value) for key, value in inner.items()}
    effective = _mapping(env.get("effective"))
    for source, names in ((env, ("world_size", "config_sha256")), (effective, _WORK)):
        facts |= {("work", name): str(source[name]) for name in names if name in source}
    for toggle in env.get("toggles") or ():
        if "name" in _mapping(toggle):
            facts["toggles", f"toggle {toggle['name']}"] = str(toggle.get("value"))
    return facts


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


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
    common = _common(a, b)
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
        if side.record.interrupted or side.record.finished_at is None:
            reasons.append(f"run {side.record.run_id} did not reach its end")
    return reasons


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
    sides = [{check.id: check for check in run.checks()} for run in (a, b)]
    required = {*a.required, *b.required}
    changes = []
    # What one of the two was not asked for cannot have changed.
    left_out = {check.id for run in (a, b) for check in run.checks() if check.left_out}
    for name in dict.fromkeys([*sides[0], *sides[1], *a.required, *b.required]):
        if name in left_out:
            continue
        left, right = (side.get(name) for side in sides)
        said = (left.outcome.value if left else "", right.outcome.value if right else "")
        changes.append(
            CheckChange(
                id=name,
                required=name in required,
                a=said[0],
                b=said[1],
                a_value=str(left.measurement) if left and left.measurement else "",
                b_value=str(right.measurement) if right and right.measurement else "",
                worse=said[0] == Outcome.PASS != said[1],
            )
        )
    return changes


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


_CONCLUSIONS = {0: "B is not shown to be worse than A", 1: "B is worse than A", 3: "undecided"}


def comparison_text(found: Comparison) -> str:
    """Comparable or not, what differs, which checks changed, how the speed changed."""
    lines = [f"A  {found.a}  {found.a_verdict}", f"B  {found.b}  {found.b_verdict}", ""]
    lines.append("comparable" if found.comparable else "NOT COMPARABLE")
    lines += [f"  {reason}" for reason in found.obstacles]
    lines += ["", "what differs"]
    lines += [f"  {one.kind}  {one.what}: {one.a} -> {one.b}" for one in found.differences]
    if not found.differences:
        lines.append("  nothing that the runs recorded")
    changed = [check for check in found.checks if check.changed]
    lines += ["", f"checks: {len(found.checks) - len(changed)} the same, {len(changed)} changed"]
    for check in changed:
        required = " (required)" if check.required else ""
        lines.append(f"  {check.id}{required}  {check.a or 'no row'} -> {check.b or 'no row'}")
        values = (("A", check.a_value), ("B", check.b_value))
        lines += [f"    {side}  {value}" for side, value in values if value]
    for speed in found.speeds:
        lines += ["", *_speed_text(speed)]
    lines += ["", _CONCLUSIONS[found.exit_code]]
    return "\n".join(lines)


def _speed_text(speed: SpeedChange) -> list[str]:
    sides = " -> ".join("/".join(map(plain_number, values)) for values in (speed.a, speed.b))
    lines = [f"throughput of {speed.phase}, tokens over time: {sides} tok/s"]
    lines.append(f"  B / A = {speed.ratio:.4f} over {len(speed.launches)} launches")
    if speed.decision:
        lines.append(f"  {speed.decision.outcome.value}: {speed.decision.reason}")
    lines.append(f"  {speed.note}")
    return lines
