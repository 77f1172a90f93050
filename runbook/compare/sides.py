"""What each run was: read from run.json and from its launches' env.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runbook.compare.types import Difference
from runbook.evidence import LaunchEvidence
from runbook.read import read_launch
from runbook.records import RunRecord

__all__ = ["Side", "differences", "obstacles", "read_side"]

_KINDS = {
    "git": "code",
    "versions": "software",
    "device": "machine",
    "world_size": "work",
    "config_sha256": "work",
    "seq_len": "work",
    "global_batch": "work",
    "accumulation": "work",
    "dtype": "work",
    "attention_path": "work",
}
_EFFECTIVE = ("seq_len", "global_batch", "accumulation", "dtype", "attention_path")
_CAUSES = ("code", "machine", "software", "toggles")


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
    found = [
        Difference(kind=kind, what=what, a=left, b=right)
        for kind, what, left, right in _record_facts(a.record, b.record)
        if left != right
    ]
    seen: dict[tuple[str, str, str, str], list[str]] = {}
    for name in _common(a, b):
        left, right = a.launches[name].env, b.launches[name].env
        if left is None or right is None:
            continue
        for fact in _env_differences(left, right):
            seen.setdefault(fact, []).append("/".join(name))
    for (kind, what, left_text, right_text), where in seen.items():
        place = where[0] if len(where) == 1 else f"{len(where)} launches"
        found.append(Difference(kind=kind, what=f"{what} ({place})", a=left_text, b=right_text))
    return found


def _record_facts(a: RunRecord, b: RunRecord) -> Iterator[tuple[str, str, str, str]]:
    yield "work", "profile", a.profile, b.profile
    yield "work", "profile digest", a.profile_sha256[:12], b.profile_sha256[:12]
    yield "harness", "runbook", a.tool_version, b.tool_version
    for name in sorted(set(a.settings) | set(b.settings)):
        kind = "toggles" if name.startswith(("NSA_", "NCCL_", "TORCH_")) else "work"
        yield kind, name, a.settings.get(name, "unset"), b.settings.get(name, "unset")


def _common(a: Side, b: Side) -> list[tuple[str, str]]:
    return [name for name in a.launches if name in b.launches]


def _env_differences(
    a: Mapping[str, Any], b: Mapping[str, Any]
) -> Iterator[tuple[str, str, str, str]]:
    left, right = _flat(a), _flat(b)
    for what in sorted(set(left) | set(right)):
        values = left.get(what, "absent"), right.get(what, "absent")
        if values[0] != values[1]:
            kind = "toggles" if what.startswith("toggle ") else _KINDS[what.partition(".")[0]]
            yield kind, what, *values


def _flat(env: Mapping[str, Any]) -> dict[str, str]:
    facts: dict[str, str] = {}
    for name in ("git", "versions", "device"):
        inner = env.get(name)
        if isinstance(inner, Mapping):
            # The branch is only a name for the commit.
            facts |= {f"{name}.{key}": str(v) for key, v in inner.items() if key != "branch"}
    for name in ("world_size", "config_sha256"):
        facts[name] = str(env.get(name, "absent"))
    effective = env.get("effective")
    if isinstance(effective, Mapping):
        facts |= {name: str(effective.get(name, "absent")) for name in _EFFECTIVE}
    for toggle in env.get("toggles") or ():
        if isinstance(toggle, Mapping) and "name" in toggle:
            facts[f"toggle {toggle['name']}"] = str(toggle.get("value"))
    return facts


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
