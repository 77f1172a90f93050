"""What a verdict is about: the machine, the workload and the checks, as they really were.

Nothing here is typed by a person. The device and the model come from the `env.json` of the launches
and from preflight; what a profile or `--set` changed is found by comparing with the shipped profile
of the same kind of machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from nsa.toggles import meaning
from runbook.config import Profile, registry
from runbook.config.load import is_shipped, load_profile
from runbook.config.plan import load_plan, needing_go, with_plan
from runbook.config.settings import Settings, parse_settings, word
from runbook.errors import OF_ONES_OWN, how_many
from runbook.records import PhaseRecord, RunRecord, Verdict
from runbook.records.evidence import PhaseEvidence
from runbook.records.own_trainer import UNCHECKED, OwnTrainer
from runbook.records.run import NODE_NAMES, Ran

_MODEL = ("model", "nsa")
_SHAPE = ("seq_len", "global_batch", "accumulation")
_FILES = {"config", "config_single", "trainer"}


def what_ran(evidence: PhaseEvidence) -> tuple[Ran, ...]:
    """The different devices and workloads of a phase's launches, by their env.json."""
    found = []
    for launch in evidence.launches.values():
        env = launch.env or {}
        device, effective = env.get("device"), env.get("effective")
        if device is not None and effective is not None:
            found.append(
                Ran(
                    device=device.get("type") or "unknown",
                    name=device.get("name") or "unknown",
                    ranks=_whole(env.get("world_size")),
                    parameters=_whole(effective.get("n_params")),
                    **{name: _whole(effective.get(name)) for name in _SHAPE},
                    dtype=effective.get("dtype") or "unknown",
                )
            )
    return tuple(dict.fromkeys(found))


def scope_of(record: RunRecord, phases: Sequence[PhaseRecord]) -> str:
    """Machine, workload, and whether throughput decides, in one line."""
    profile = profile_of(record)
    ran = tuple(dict.fromkeys(one for phase in phases for one in phase.ran))
    own = profile.own_trainer
    results = [e.result for one in phases for e in one.launches if e.launch.kind == "own"]
    if own is not None and any(one.ok for one in results):
        parts = _of_own(own, profile)
    elif any(one.attempts and not one.could_not_start for one in results):
        parts = ["no training finished"]
    else:
        parts = [_machine(record.environment, ran), *_workloads(ran)]
    gates = profile.throughput_gated and any(
        name.endswith(".throughput") for name in record.required
    )
    return "; ".join([*parts, *([] if gates else ["function only, throughput not gated"])])


def _of_own(own: OwnTrainer, profile: Profile) -> list[str]:
    """What the profile declares: such a trainer proves nothing of what it ran on, or on what."""
    device = "GPU" if profile.has_gpu else "CPU"
    tokens = f"{own.tokens(profile.ranks)} tokens a step as declared"
    return [f"{how_many(profile.ranks, 'rank')} of {own.name} on {device}", tokens]


def caveats_of(record: RunRecord, phases: Sequence[PhaseRecord]) -> tuple[str, ...]:
    """How this run asked for less, or for something else, than the shipped profile of its kind."""
    profile, asked = profile_of(record), record.invocation
    caveats = [*_behind(profile, phases), *departures(profile, parse_settings(asked.settings))]
    if asked.steps_scale != 1.0:
        caveats.append(f"steps x {asked.steps_scale:g}")
    if asked.aa:
        caveats.append("A/A: equal arms")
    flaky = [f"{phase.name}/{name}" for phase in phases for name in phase.flaky]
    if flaky:
        caveats.append(f"FLAKY ({', '.join(flaky)} needed a second attempt)")
    lost = [
        f"{entry.launch.id} went on from step {begun.step}: {', '.join(begun.refused)}"
        for phase in phases
        for entry in phase.launches
        if (begun := entry.result.begun) and begun.refused
    ]
    if lost:
        caveats.append(f"CHECKPOINT LOST ({'; '.join(lost)})")
    if cut_off := record.options.get("cut_off"):
        caveats.append(f"CUT OFF ({cut_off})")
    # A failure that went away must not look as if it never was.
    again = [
        f"{phase.name} after {', '.join(ended)}"
        for phase in phases
        if (ended := [one.outcome for one in phase.repeated if one.started])
    ]
    if again:
        caveats.append(f"REPEATED ({', '.join(again)})")
    return tuple(caveats)


def departures(profile: Profile, settings: Settings) -> list[str]:
    """What the profile and `--set` change of the shipped profile of its kind; the checks first.

    A plan's phases are held against those of the shipped plan; one's own plan is named instead.
    """
    base = _as_planned(_shipped_like(profile), profile)
    kept = sum(name in set(profile.required) for name in base.required)
    found = [f"plan {profile.plan.name}"] if profile.plan and not profile.plan.shipped else []
    if profile.own_trainer is not None:
        by = f"judged from outside by {kept} of {len(base.required)} checks"
        found.append(f"{profile.own_trainer.name}{OF_ONES_OWN}, {by}; {UNCHECKED}")
    elif kept < len(base.required):
        found.append(f"for {kept} of {len(base.required)} checks")
    changed = _changed(settings.config_overrides, {})
    for name, phase in profile.phases.items():
        before = base.phases[name].config_overrides if name in base.phases else {}
        changed += [f"{name}:{text}" for text in _changed(phase.config_overrides, before)]
    model = [text for text in changed if text.rpartition(":")[2].split(".")[0] in _MODEL]
    names = set() if profile.own_trainer else _FILES
    files = _changed(*(one.model_dump(include=names) for one in (profile, base)))
    rest = [text for text in changed if text not in model]
    groups = {
        "model": model,
        "config": [*files, *rest],
        "workload": _changed(
            *(one.workload.model_dump(exclude={"source"}) for one in (profile, base))
        ),
        "settings": [*_of_variables(profile, base), *_given(settings, base)],
    }
    found += [f"{what} changed ({', '.join(texts)})" for what, texts in groups.items() if texts]
    if shorter := _shorter(profile, base):
        found.append(f"fewer steps ({', '.join(shorter)})")
    loosened = _loosened(profile, base)
    return [*found, *([f"limits loosened ({', '.join(loosened)})"] if loosened else [])]


def _given(settings: Settings, base: Profile) -> list[str]:
    """The variables that mean something else than what the shipped profile sets, or leaves."""
    environments = [base.variables]
    environments += [{**base.variables, **phase.variables} for phase in base.phases.values()]
    return [
        f"{name}={value}"
        for name, value in settings.toggles.items()
        if any(meaning(name, one) != meaning(name, settings.toggles) for one in environments)
    ]


def profile_of(record: RunRecord) -> Profile:
    """The profile that the run was judged by."""
    # It was checked when the run began; which checks are installed now does not matter here.
    return Profile.model_validate_json(json.dumps(record.profile_document))


_shipped = lru_cache(maxsize=4)(load_profile)


def _shipped_like(profile: Profile) -> Profile:
    """The shipped profile of that name, or of the same kind of device and number of ranks."""
    same = _shipped(profile.name) if is_shipped(profile.name) else None
    kind = (profile.hardware.device, min(profile.ranks, 2))
    if same is not None and (same.hardware.device, min(same.ranks, 2)) == kind:
        return same
    if profile.hardware.device == "cpu":
        return _shipped("cpu")
    return _shipped("h200x1" if profile.ranks == 1 else "a100x2_pcie4")


def _as_planned(base: Profile, profile: Profile) -> Profile:
    """The shipped profile with the plan that this one has."""
    note = profile.plan
    if note is None:
        return base
    if note.shipped:
        return with_plan(base, load_plan(note.name, has_gpu=base.has_gpu), shipped=True)
    made = {name: one for name, one in profile.phases.items() if one.stage is not None}
    update = {"phases": {**base.phases, **made}, "required": profile.required}
    return base.model_copy(update=update)


def _behind(profile: Profile, phases: Sequence[PhaseRecord]) -> list[str]:
    """What a production launch stands on, where that is less than a whole GO."""
    ran = [phase.name for phase in phases if phase.started_at and phase.launches]
    if profile.plan is None or not needing_go(profile, ran):
        return []
    run_id, _, said = profile.plan.go.partition(": ")
    if not run_id:
        return ["STARTED WITHOUT A GO (of this configuration on this machine)"]
    return [] if said == Verdict.GO else [f"BEHIND {run_id}, which was {said}"]


def _changed(after: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    """What is not as it was before, or was not there, as one would type it."""
    return [f"{name}={word(one)}" for name, one in after.items() if before.get(name) != one]


def _of_variables(profile: Profile, base: Profile) -> list[str]:
    """Variables that the whole profile sets to something else, or no longer."""
    before, after = base.variables, profile.variables
    return [*_changed(after, before), *(f"{name} unset" for name in before if name not in after)]


def _shorter(profile: Profile, base: Profile) -> list[str]:
    """Phases that do less than those of the shipped profile."""
    return [
        f"{name}.{key}={getattr(settings, key)}"
        for name, settings in profile.phases.items()
        for key in ("steps", "launches", "rounds")
        if name in base.phases and getattr(settings, key) < getattr(base.phases[name], key)
    ]


def _loosened(profile: Profile, base: Profile) -> list[str]:
    known = registry.known_limits(base.phases)
    found = []
    for name, before in base.limits.items():
        after, spec = profile.limits.get(name), known.get(name)
        if after is None or spec is None or not before.gated:
            continue
        higher = spec.floor
        lower = after.value < before.value if higher else after.value > before.value
        if lower or not after.gated:
            found.append(name)
    return found


def _machine(environment: Mapping[str, str], ran: Sequence[Ran]) -> str:
    if not ran:
        return "no training ran"
    machines = []
    for device, name in dict.fromkeys((one.device, one.name) for one in ran):
        ranks = max(one.ranks for one in ran if (one.device, one.name) == (device, name))
        link = environment.get("gpu.pcie_gen_max", "")
        where = f"{ranks} x {name}" if device != "cpu" else f"{how_many(ranks, 'rank')} on CPU"
        machines.append(f"{where}, PCIe {link}" if link and device != "cpu" else where)
    nodes = environment.get(NODE_NAMES, "").split(", ")
    over = f" over {len(nodes)} nodes" if len(nodes) > 1 else ""
    return f"{' and '.join(machines)}{over}"


def _workloads(ran: Iterable[Ran]) -> list[str]:
    found: dict[tuple[str, str], dict[str, None]] = {}
    for one in ran:
        model = f"{one.parameters / 1e6:.1f}M parameters, S={one.seq_len}"
        batches = found.setdefault((model, one.dtype), {})
        batches[f"{one.global_batch} x {one.accumulation}"] = None
    texts = [
        f"{model}, batch {' and '.join(batches)}, {dtype}"
        for (model, dtype), batches in found.items()
    ]
    return [" and ".join(texts)] if texts else []


def _whole(value: object) -> int:
    return value if isinstance(value, int) and value >= 0 else 0
