"""A plan: phases in order, each with its gate, as data that people write themselves.

`with_plan` makes of a machine's profile and a plan one profile, which everything else reads: what
is launched, what it is held against, and what a GO needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field

from nsa.settings import DataSection, Whole
from nsa.toggles import meaning
from runbook import BOARD, BOARD_TOGGLE, absent, is_installed
from runbook.config import LimitValue, PhaseSettings, PlanNote, Profile, Sourced, Stage, registry
from runbook.config.extends import merged, validated, whole_document
from runbook.config.load import load_profile_document
from runbook.config.registry import Made
from runbook.config.settings import Scalar
from runbook.errors import UsageError, choice_for
from runbook.files import data_path
from runbook.records.measurement import Record

# Stands for the phases that `runbook run` runs.
_ALL = "all"
NO_BOARD = "without TensorBoard"
_DATASETS = get_args(DataSection.model_fields["dataset"].annotation)
# Made from the config alone: a validation trains on it already.
_GENERATED = ("synthetic", "markov")
_NAME = r"^[a-z][a-z0-9_]*$"
# What a launch may do differently from the run behind it: how long, on which data, what it writes.
FREE_KEYS = frozenset(
    {
        *("data.dataset", "data.local_path", "data.text_field", "data.loader_timeout_s"),
        *("train.steps", "train.out_dir", "train.log_every"),
        *("train.eval_every", "train.eval_batches", "train.save_every"),
        *("train.keep_last", "train.keep_every", "train.keep_best"),
    }
)


class PlannedPhase(Stage):
    """A phase that a plan makes, with its settings (`runbook.config.PhaseSettings`)."""

    # Its place in the plan is where it stands there.
    order: Literal[0] = 0
    steps: Whole
    env: dict[str, Sourced] = Field(default_factory=dict)
    config_overrides: dict[str, Scalar] = Field(default_factory=dict)
    timeout_s: float = Field(gt=0)
    typical_s: float | None = Field(default=None, gt=0)
    source: str = Field(min_length=1)


class Differences(Record):
    """What differs on a profile without GPUs; merged into the plan as one profile into another."""

    phases: dict[str, dict[str, Any]] = Field(default_factory=dict)
    limits: dict[str, dict[str, Any]] = Field(default_factory=dict)


class Plan(Record):
    """A plan as its file says it. `stops`: nothing starts behind a phase that did not pass.

    Of an installed phase it says nothing but its name: that has its settings from the profile.
    """

    schema_version: Literal[1]
    name: str = Field(pattern=_NAME)
    title: str = Field(min_length=1)
    stops: bool
    phases: dict[str, PlannedPhase | None] = Field(min_length=1)
    limits: dict[str, LimitValue] = Field(default_factory=dict)
    cpu: Differences = Differences()


def _folder() -> Path:
    return data_path("configs") / "plans"


def load_plan(name_or_path: str, *, has_gpu: bool = True) -> Plan:
    """A shipped plan by name, or one's own by path, as it is for machines with or without GPUs.

    Raises UsageError that lists every wrong key and value.
    """
    document = whole_document("plan", name_or_path, _folder())
    plan = _read(document, where=name_or_path)
    if not has_gpu:
        # A plan that extends another one need not have all of its phases.
        mine = {name: one for name, one in plan.cpu.phases.items() if name in plan.phases}
        change = {"phases": mine, "limits": plan.cpu.limits, "cpu": None}
        plan = _read(merged(document, change), where=f"{name_or_path}: on a CPU")
    return plan


def without_board(plan: Plan) -> Plan:
    """The plan as it can be had here: no gate needs TensorBoard, so it goes without the package."""
    if is_installed(BOARD):
        return plan
    off = Sourced(value="1", source=f"{NO_BOARD} ({absent(BOARD)})")
    phases = {
        name: one.model_copy(update={"env": {**one.env, BOARD_TOGGLE: off}})
        if one and meaning(BOARD_TOGGLE, {key: v.value for key, v in one.env.items()}) is False
        else one
        for name, one in plan.phases.items()
    }
    return plan.model_copy(update={"phases": phases})


def _read(document: Mapping[str, Any], *, where: str) -> Plan:
    phases = document.get("phases")
    if isinstance(phases, dict):
        document = {**document, "phases": {name: one or None for name, one in phases.items()}}
    plan = validated(Plan, document, where)
    problems = [text for name, one in plan.phases.items() for text in _wrong(name, one)]
    problems += [] if problems else _without_gate(plan.phases)
    if problems:
        raise UsageError([f"{where}: phases.{text}" for text in problems])
    return plan


def _wrong(name: str, one: PlannedPhase | None) -> list[str]:
    """What is wrong with a phase of a plan, each with what is allowed."""
    known = (_ALL, *registry.phases())
    if one is None:
        if name in known:
            return []
        return [
            f"{name}: no such phase{choice_for(name, known)}; one of the plan's own "
            f"needs a kind: {', '.join(registry.kinds())}"
        ]
    if name in known:
        return [f"{name}: an installed phase has this name; leave out kind, or name it otherwise"]
    if one.kind not in registry.kinds():
        return [f"{name}.kind: no {one.kind!r}{choice_for(one.kind, registry.kinds())}"]
    return [f"{name}.{text}" for text in _made_wrong(one, registry.kinds()[one.kind])]


def _made_wrong(one: PlannedPhase, kind: type[Made]) -> list[str]:
    allowed = kind.known_checks()
    problems = [
        f"checks: no check {what!r}{choice_for(what, allowed)}"
        for what in one.checks
        if what not in allowed
    ]
    if len(set(one.checks)) < len(one.checks):
        problems.append(f"checks: expected some of {', '.join(allowed)}, none twice")
    if one.dataset not in _DATASETS:
        problems.append(f"dataset: no {one.dataset!r}{choice_for(one.dataset, _DATASETS)}")
    if one.legs > 1 and one.steps % one.legs:
        problems.append(f"legs: {one.legs} do not divide {one.steps} steps")
    if one.resume_steps and one.legs > 1:
        problems.append("resume_steps: legs resume already; leave out one of the two")
    if one.resume_steps >= one.steps:
        problems.append(f"resume_steps: expected fewer than the {one.steps} steps")
    return problems


def _without_gate(phases: Mapping[str, PlannedPhase | None]) -> list[str]:
    """Phases behind a GO whose data, tokenizer or model no gate before them has trained on.

    What is generated the GO's own phases train on; they never read documents.
    """
    seen: list[tuple[str, dict[str, Scalar]]] = []
    problems = []
    for name, one in phases.items():
        if one is None:
            continue
        config = _changed(one.config_overrides)
        if not one.needs_go:
            seen.append((one.dataset, config))
        elif one.dataset not in _GENERATED and (one.dataset, config) not in seen:
            what = " with ".join([one.dataset, *(f"{key}={v}" for key, v in config.items())])
            problems.append(
                f"{name}.dataset: no phase before it trains on {what}; let one that needs no GO "
                "be its gate, with the same dataset and config_overrides"
            )
    return problems


def with_plan(
    profile: Profile,
    plan: Plan,
    *,
    shipped: bool,
    chosen: Mapping[str, str] | None = None,
    go: str = "",
    parameters: int = 0,
) -> Profile:
    """The profile of a machine with the plan's phases, limits and checks.

    `go` names the accepted run behind it, `chosen` are the variables which that one chose and
    `parameters` those of its model. Raises UsageError that lists everything that does not fit
    together.
    """
    standard = registry.standard_phases()
    names = [name for one in plan.phases for name in (standard if one == _ALL else [one])]
    by = f"chosen in {go.partition(':')[0]}"
    env = {name: Sourced(value=value, source=by) for name, value in (chosen or {}).items()}
    made = {
        name: _settings(order, one, env)
        for order, (name, one) in enumerate(plan.phases.items())
        if one
    }
    note = PlanNote(
        name=plan.name,
        shipped=shipped,
        stops=plan.stops,
        phases=tuple(names),
        go=go,
        parameters=parameters,
    )
    changed = profile.model_copy(
        update={
            "phases": {**profile.phases, **made},
            "limits": {**profile.limits, **plan.limits},
            "plan": note,
        }
    )
    table = registry.phases_of(changed.phases)
    order = [name for name in table if name in names]
    if order != names:
        raise UsageError(
            f"plan {plan.name}: phases run in the order {', '.join(order)}",
            hint="write them so: installed phases first, in their running order",
        )
    changed = changed.model_copy(update={"required": _required(changed, names)})
    return load_profile_document(changed.model_dump(mode="json"), where=f"plan {plan.name}")


def _required(profile: Profile, names: list[str]) -> tuple[str, ...]:
    """What a GO needs: of installed phases what the profile says, of made ones their checks."""
    table = registry.phases_of(profile.phases)
    found: list[str] = []
    for name in names:
        phase = table[name]
        if isinstance(phase, Made):
            found += phase.needed(profile)
        else:
            found += [check for check in profile.required if check.partition(".")[0] == name]
    return tuple(found)


def _settings(order: int, one: PlannedPhase, chosen: Mapping[str, Sourced]) -> PhaseSettings:
    """The phase's settings in the profile; what an accepted run chose is part of them."""
    said = {name: getattr(one, name) for name in PlannedPhase.model_fields}
    stage = {name: said.pop(name) for name in Stage.model_fields} | {"order": order}
    return PhaseSettings(**said | {"env": {**chosen, **one.env}}, stage=Stage(**stage))


def needing_go(profile: Profile, names: Iterable[str]) -> list[str]:
    """Of these phases those that start only behind a GO."""
    stages = {name: profile.phases[name].stage for name in names if name in profile.phases}
    return [name for name, stage in stages.items() if stage and stage.needs_go]


def stands_on_go(profile: Profile, name: str) -> bool:
    """Does this phase of the plan train what a phase behind a GO trains? Gates before it do."""
    settings = profile.phases[name]
    if settings.stage is None or profile.plan is None:
        return False
    behind = [profile.phases[one] for one in needing_go(profile, profile.plan.phases)]
    return _changed(settings.config_overrides) in [_changed(one.config_overrides) for one in behind]


def _changed(overrides: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """What a phase trains otherwise than the config does."""
    return {key: value for key, value in overrides.items() if key not in FREE_KEYS}
