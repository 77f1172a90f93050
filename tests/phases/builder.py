"""A phase on a shipped profile: its plan, healthy evidence of it, and its judgement."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from runbook.config import Profile, registry
from runbook.config.load import load_profile
from runbook.config.registry import Judgement, PlanContext
from runbook.folder.facts import device_facts, env_facts
from runbook.records import Check, Launch
from runbook.records.evidence import AcceptedRun, AcceptedRuns, Fact, LaunchEvidence, PhaseEvidence
from runbook.records.invocation import Invocation
from tests.phases.spoil import Change
from tests.phases.traces import healthy
from tests.phases.trainer import HEALTHY, SHA, told

PHASES = registry.phases()

_profile = functools.cache(load_profile)


COMMITS = {"reference": "a" * 40, "head": "b" * 40}


def context(name: str = "a100x2_pcie4", **changes: Any) -> PlanContext:
    """A context on a shipped profile, with two commits for a phase that compares them."""
    return PlanContext(profile=_profile(name), **{**COMMITS, **changes})


def on_nodes(nodes: int, profile: str = "a100x2_pcie4") -> PlanContext:
    """A run on so many nodes with one rank on each, and one sequence for each rank."""
    known = _profile(profile)
    work = known.workload.model_copy(update={"global_batch": nodes})
    return PlanContext(
        profile=known.model_copy(update={"ranks": nodes, "workload": work}),
        nodes=nodes,
        invocation=Invocation(profile=profile, launcher="slurm", nodes=nodes),
    )


def with_profile(base: PlanContext, **changes: Any) -> PlanContext:
    """The same context on a changed profile; a limit is given as `limits={name: value}`."""
    document: dict[str, Any] = base.profile.model_dump(mode="json")
    for name, value in changes.pop("limits", {}).items():
        document["limits"][name]["value"] = value
    document |= changes
    return replace(base, profile=Profile.model_validate(document))


def with_launches(where: PlanContext, count: int) -> PlanContext:
    """The same, with so many launches of the baseline."""
    phases = dict(where.profile.phases)
    phases["baseline"] = phases["baseline"].model_copy(update={"launches": count})
    return replace(where, profile=where.profile.model_copy(update={"phases": phases}))


# Every phase that trains unless it is left out.
TRAINING = tuple(
    name
    for name, phase in PHASES.items()
    if not phase.optional and f"{name}.ranks_alive" in phase.check_ids(context())
)


_FACTS: dict[str, tuple[Any, str]] = {
    name: (value, path) for path, told in HEALTHY["facts"].items() for name, value in told.items()
}


def facts(**changes: Any) -> dict[str, Fact]:
    """The machine of the profile; `gpu_count=1.0` changes the fact gpu.count."""
    renamed = {key.replace("_", ".", 1): value for key, value in changes.items()}
    unknown = set(renamed) - set(_FACTS)
    assert not unknown, unknown
    return {
        name: Fact(name=name, value=renamed.get(name, value), path=path, sha256=SHA, note="as seen")
        for name, (value, path) in _FACTS.items()
    }


def accepted(
    found: PhaseEvidence, rates: Sequence[float] = (), other: Sequence[str] = (), **fields: Any
) -> AcceptedRuns:
    """Accepted runs at these rates, of the same work and machine but for this fact of a kind."""
    first = next(iter(found.launches.values()))
    facts = env_facts(first.env or {}) | device_facts(first.devices_before)
    facts |= {(other[0], other[1]): "another"} if other else {}
    runs = tuple(
        AcceptedRun(
            run_id=f"run{number}",
            run_sha256="a" * 64,
            rates=(rate, rate * 1.01, rate * 1.02),
            facts=tuple((*name, text) for name, text in facts.items()),
        )
        for number, rate in enumerate(rates, start=1)
    )
    known = {"left_out": {}, **fields}
    return AcceptedRuns(runs=runs, path="baseline/accepted.json", sha256=SHA, **known)


_NAMES = {"A100": "NVIDIA A100 80GB PCIe"}


def machine(profile: Profile) -> dict[str, Any]:
    """The facts of the machine that a profile is for."""
    hardware = profile.hardware
    if not hardware.gpu_name:
        return {}
    count = float(hardware.gpus)
    name = _NAMES.get(hardware.gpu_name, f"NVIDIA {hardware.gpu_name}")
    return {
        **dict.fromkeys(("torch_device_count", "gpu_installed", "gpu_count"), count),
        "gpu_names": ", ".join([name] * hardware.gpus),
        "gpu_memory_total_mib": HEALTHY["memory_mib"][hardware.gpu_name[:4]],
        "gpu_pcie_gen_max": float(hardware.pcie_gen or 4),
        "gpu_nvlink": bool(hardware.nvlink),
    }


def evidence(
    phase: str,
    where: PlanContext,
    *,
    change: Change | None = None,
    only: Sequence[str] | None = None,
    earlier: Mapping[str, PhaseEvidence] | None = None,
    conditional: bool = False,
    **speed: Any,
) -> PhaseEvidence:
    """Healthy launches of a phase's plan; `change` spoils those named in `only` (all if None).

    Those that start only if the phase needs them are there if `conditional`.
    """
    found: dict[str, LaunchEvidence] = {}
    planned = PHASES[phase].plan(where)
    for launch in (one for one in planned if conditional or not one.conditional):
        made = healthy(launch, batch_of(launch, where.profile), **speed)
        if change is not None and (only is None or launch.name in only):
            made = changed(made, change)
        found[launch.name] = made
    return PhaseEvidence(
        launches=found,
        facts=facts(**machine(where.profile)) if phase == "preflight" else {},
        earlier=earlier or {},
    )


def baseline_at(*rates: float, where: PlanContext | None = None) -> dict[str, PhaseEvidence]:
    """An earlier baseline whose launches ran at these rates in turn."""
    where = where or context()
    planned = zip(PHASES["baseline"].plan(where), rates, strict=False)
    made = {one.name: healthy(one, where.profile, rate=rate) for one, rate in planned}
    return {"baseline": PhaseEvidence(launches=made)}


def batch_of(launch: Launch, profile: Profile) -> Profile:
    """The profile with the batch that the phase itself plans for this launch."""
    batch = launch.config_overrides.get("train.batch_size")
    if batch is None:
        return profile
    workload = profile.workload.model_copy(update={"global_batch": batch})
    return profile.model_copy(update={"workload": workload})


def changed(made: LaunchEvidence, change: Change) -> LaunchEvidence:
    """Changed; the heartbeats follow a changed CSV, unless they are what was changed."""
    after = change(made)
    moved = after.training is not None and after.training is not made.training
    return told(after) if moved and after.ranks is made.ranks else after


def judge(phase: str, found: PhaseEvidence, where: PlanContext) -> Judgement:
    """The phase's judgement; its checks must be the declared ones."""
    judgement = PHASES[phase].judge(found, where)
    assert tuple(check.id for check in judgement.checks) == PHASES[phase].check_ids(where)
    return judgement


@functools.cache
def healthy_checks(phase: str, profile: str) -> Mapping[str, Check]:
    """The checks of a phase in which nothing is spoiled, by id."""
    where = context(profile)
    return {check.id: check for check in judge(phase, evidence(phase, where), where).checks}


def row(phase: str, what: str, found: PhaseEvidence, where: PlanContext) -> Check:
    """One check of a phase. Only its row is asked, and those that it may follow from."""
    whole = {row.what: row for row in PHASES[phase].asked(where)}
    wanted = {what, whole[what].rests_on, whole[what].restates}
    alone = copy.copy(PHASES[phase])
    alone.asked = lambda context: [row for name, row in whole.items() if name in wanted]
    alone.details = lambda case: Judgement(checks=())
    checks = {check.id: check for check in alone.judge(found, where).checks}
    return checks[f"{phase}.{what}"]
