"""Reading a profile, with everything that is wrong told at once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel, ValidationError

from nsa.settings import load_strict
from runbook import registry
from runbook.config.limits import limit_problems
from runbook.config.presets import load_preset, merged
from runbook.config.profile import Profile
from runbook.config.settings import override_problems, variable_problems
from runbook.errors import UsageError, did_you_mean
from runbook.files import data_path

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


def profile_names() -> tuple[str, ...]:
    """Names of the shipped profiles, in alphabetical order."""
    return tuple(sorted(path.stem for path in _folder().glob("*.yaml")))


def is_profile_file(name_or_path: str) -> bool:
    """Is this the path of a profile, and not the name of a shipped one?"""
    return "/" in name_or_path or name_or_path.endswith((".yaml", ".yml"))


def load_profile(name_or_path: str) -> Profile:
    """Load a shipped profile by name, or one's own by path (it ends in .yaml or has a slash).

    A profile may say `extends: NAME` and then only what differs; null drops an inherited key.
    `preset: NAME` gives it the variables of a preset, below those of its own `env`.
    Raises UsageError that lists every wrong key and value.
    """
    document = _document(name_or_path, seen=())
    return load_profile_document(document, where=name_or_path)


def load_profile_document(document: Mapping[str, object], *, where: str = "profile") -> Profile:
    """Validate a whole profile, such as the one kept in run.json. Raises UsageError."""
    try:
        profile = Profile.model_validate_json(json.dumps(document), strict=True)
    except ValidationError as error:
        problems = [_problem(detail) for detail in error.errors()]
        raise UsageError([f"{where}: {text}" for text in problems]) from error
    problems = _unknown_references(profile)
    if problems:
        raise UsageError([f"{where}: {text}" for text in problems])
    return profile


def _folder() -> Path:
    return data_path("configs") / "profiles"


def _document(name_or_path: str, *, seen: tuple[str, ...]) -> dict[str, Any]:
    if name_or_path in seen:
        raise UsageError(f"profiles extend each other in a circle: {' -> '.join(seen)}")
    path = _locate(name_or_path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"profile {str(path)!r} cannot be read: {reason}") from error
    data, problems = load_strict(text)
    if not problems and not isinstance(data, dict):
        problems = [f"expected a mapping of keys, got {type(data).__name__}"]
    if problems:
        raise UsageError([f"{path}: {problem}" for problem in problems])
    _take_preset(data, path)
    base = data.pop("extends", None)
    if base is None:
        return dict(data)
    if not isinstance(base, str):
        raise UsageError(f"{path}: extends: expected the name of a profile, got {base!r}")
    return merged(_document(base, seen=(*seen, name_or_path)), data)


def _take_preset(data: dict[str, Any], path: Path) -> None:
    named = data.pop("preset", None)
    if named is None:
        return
    if not isinstance(named, str):
        raise UsageError(f"{path}: preset: expected the name of a preset, got {named!r}")
    own = data.get("env") or {}
    variables = load_preset(named).model_dump(mode="json")["env"]
    data["env"] = merged(variables, own) if isinstance(own, dict) else own


def _locate(name_or_path: str) -> Path:
    if is_profile_file(name_or_path):
        return Path(name_or_path)
    names = profile_names()
    if name_or_path not in names:
        raise UsageError(
            f"no profile {name_or_path!r}{did_you_mean(name_or_path, names)}; "
            f"there are: {', '.join(names)}; a file of your own needs a path ending in .yaml"
        )
    return _folder() / f"{name_or_path}.yaml"


def _problem(detail: ErrorDetails) -> str:
    place = ".".join(str(part) for part in detail["loc"]) or "profile"
    if detail["type"] == "extra_forbidden":
        if detail["loc"] == ("scope",):
            return "scope: leave it out; what a verdict is about is derived from what really ran"
        known = _fields_at(detail["loc"][:-1])
        near = did_you_mean(str(detail["loc"][-1]), known)
        return f"{place}: unknown key{near}; allowed: {', '.join(sorted(known))}"
    if detail["type"] == "missing":
        return f"{place}: missing"
    message = detail["msg"].removeprefix("Value error, ")
    shown = "" if isinstance(detail["input"], dict) else f", got {detail['input']!r}"
    return f"{place}: {message}{shown}"


def _fields_at(location: tuple[int | str, ...]) -> list[str]:
    """Field names of the model that sits at `location` inside a profile."""
    model: Any = Profile
    for part in location:
        if isinstance(model, type) and issubclass(model, BaseModel):
            field = model.model_fields.get(str(part))
            model = field.annotation if field else None
        else:
            model = next(iter(get_args(model)[::-1]), None)
    is_model = isinstance(model, type) and issubclass(model, BaseModel)
    return list(model.model_fields) if is_model else []


def _unknown_references(profile: Profile) -> list[str]:
    """Phases, limits and required checks by names that exist nowhere, or that are missing."""
    known = registry.phases()
    problems = [
        f"phases.{name}: no such phase{did_you_mean(name, known)}; there are: {', '.join(known)}"
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
        needed=registry.known_limits(profile.phases),
        known=registry.known_limits(known),
    )
    problems += _setting_problems(profile)
    return problems or _unknown_checks(profile)


def _setting_problems(profile: Profile) -> list[str]:
    """Variables, config keys and arms that `--set` would refuse."""
    own = {name: one.value for name, one in profile.env.items()}
    problems = [f"env.{text}" for text in variable_problems(own)]
    phases = registry.phases()
    for name, settings in profile.phases.items():
        place = f"phases.{name}"
        added = {variable: one.value for variable, one in settings.env.items()}
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
    return [
        f"required: no check {name!r}{did_you_mean(name, known)}"
        for name in profile.required
        if name not in known
    ]
