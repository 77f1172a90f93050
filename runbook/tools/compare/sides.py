"""Two sides of a comparison: what differs between them, and whether one cause can be named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from runbook.folder.comparability import Difference, Facts, device_facts, env_facts, unlike
from runbook.folder.launch.evidence import read_launch
from runbook.folder.manifest import record_is_changed
from runbook.folder.names import MANIFEST_FILE, RECORD_FILE
from runbook.records import PhaseRecord, RunRecord
from runbook.records.evidence import LaunchEvidence

_CAUSES = ("code", "machine", "software", "toggles")


@dataclass(frozen=True, kw_only=True)
class Side:
    """One run with what its trainer launches left, by phase and launch name.

    `changed`: its run.json is another file than its manifest has.
    """

    record: RunRecord
    changed: bool
    launches: Mapping[tuple[str, str], LaunchEvidence]


def read_side(record: RunRecord, folder: Path) -> Side:
    """Read the trainer launches of a run. Raises OSError if the disk cannot be read."""
    launches = {
        (phase.name, entry.launch.name): read_launch(folder, entry.launch, entry.result)
        for phase in record.phases
        for entry in phase.launches
        if entry.launch.kind in ("trainer", "own")
    }
    return Side(record=record, changed=record_is_changed(folder), launches=launches)


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
        if side.changed:
            reasons.append(
                f"{RECORD_FILE} of {side.record.run_id} is another file than its {MANIFEST_FILE} "
                f"has: see runbook verify {side.record.run_id}"
            )
        if side.record.interrupted or side.record.finished_at is None:
            reasons.append(f"run {side.record.run_id} did not complete")
    return reasons
