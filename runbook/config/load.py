"""Reading a profile, with everything that is wrong told at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runbook.config import registry
from runbook.config.extends import (
    SHOWN_GPUS,
    gpus_by_name,
    key_problem,
    validated,
    whole_document,
    with_preset,
)
from runbook.config.limits import Limit, limit_problems
from runbook.config.machines import machines
from runbook.config.profile import Profile
from runbook.config.settings import override_problems, variable_problems
from runbook.errors import UsageError, choice_for, did_you_mean
from runbook.files import data_path, shipped_names

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


def profile_names() -> tuple[str, ...]:
    """Names of the shipped profiles in alphabetical order, of several GPUs those of two."""
    return tuple(one for one in _every_name() if gpus_by_name(one) <= SHOWN_GPUS)


def is_shipped(name: str) -> bool:
    """Is this the name of a shipped profile, of any number of GPUs?"""
    return name in _every_name()


def _every_name() -> list[str]:
    return sorted((*shipped_names(_folder()), *machines()))


def load_profile(name_or_path: str) -> Profile:
    """Load a shipped profile by name, or one's own by path (it ends in .yaml or has a slash).

    A profile may say `extends: NAME` and then only what differs; null drops an inherited key.
    `preset: NAME` gives it the variables of a preset, below those of its own `env`.
    Raises UsageError that lists every wrong key and value.
    """
    document = whole_document(
        "profile", name_or_path, _folder(), made=machines(), prepare=_prepared
    )
    return load_profile_document(document, where=name_or_path)


def load_profile_document(document: Mapping[str, object], *, where: str = "profile") -> Profile:
    """Validate a whole profile, such as the one kept in run.json. Raises UsageError."""
    profile = validated(Profile, document, where, told=_problem)
    problems = _unknown_references(profile)
    if problems:
        raise UsageError([f"{where}: {text}" for text in problems])
    return profile


def limits_of(profile: Profile) -> list[Limit]:
    """The limits that a profile sets, in force, in the order of the phases."""
    known = registry.known_limits(profile.phases)
    return [profile.limit(spec) for spec in known.values() if spec.name in profile.limits]


def _folder() -> Path:
    return data_path("configs") / "profiles"


def _prepared(data: dict[str, Any], path: Path) -> dict[str, Any]:
    # One key in a file, two in a profile: a module's name, or how a program is started.
    if isinstance(data.get("trainer"), dict):
        data["own_trainer"] = data.pop("trainer")
    return with_preset(data, str(path))


def _problem(detail: ErrorDetails) -> str:
    if detail["loc"] == ("scope",) and detail["type"] == "extra_forbidden":
        return "scope: leave it out; what a verdict is about is derived from what really ran"
    return key_problem(detail, Profile).removeprefix("own_")


def _unknown_references(profile: Profile) -> list[str]:
    """Phases, limits and required checks by names that exist nowhere, or that are missing."""
    known = registry.phases_of(profile.phases)
    problems = [
        f"phases.{name}: no such phase{choice_for(name, known)}"
        for name in profile.phases
        if name not in known
    ]
    needed = registry.standard_phases()
    problems += [
        f"phases.{name}: missing; it needs timeout_s and source"
        for name in needed
        if name not in profile.phases
    ]
    problems += limit_problems(
        profile.limits,
        needed=registry.known_limits(profile.phases, profile.phases),
        known=registry.known_limits(known, profile.phases),
    )
    problems += _setting_problems(profile)
    return problems or _unknown_checks(profile)


def _setting_problems(profile: Profile) -> list[str]:
    """Variables, config keys and arms that `--set` would refuse."""
    own = profile.variables
    problems = [f"env.{text}" for text in variable_problems(own)]
    phases = registry.phases_of(profile.phases)
    for name, settings in profile.phases.items():
        place = f"phases.{name}"
        added = settings.variables
        # A phase's variables are judged beside the profile's, which a launch sets too.
        known = set(problems)
        problems += [
            f"{place}.env.{text}"
            for text in (variable_problems(own | added) if added else [])
            if f"env.{text}" not in known
        ]
        overrides = override_problems(settings.config_overrides)
        problems += [f"{place}.config_overrides.{text}" for text in overrides]
        toggle = phases[name].arms_toggle if name in phases else ""
        problems += [
            f"{place}.arms: {text}"
            for arm in (settings.arms if toggle else ())
            for text in variable_problems({toggle: arm})
        ]
    return problems


def _unknown_checks(profile: Profile) -> list[str]:
    known = registry.known_checks(profile)
    problems = [
        f"required: no check {name!r}{did_you_mean(name, known)}"
        for name in profile.required
        if name not in known
    ]
    own = profile.own_trainer
    if own is None or problems:
        return problems
    answered = registry.own_checks(profile)
    if odd := [name for name in profile.required if name not in answered]:
        problems.append(
            f"required: {own.name} is a trainer of your own and cannot answer {', '.join(odd)}; "
            f"it can answer {', '.join(answered)}"
        )
    return problems
