"""`--set KEY=VALUE`: toggles and config keys, checked against the trainer's own tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, cast

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from nsa.settings import TrainerConfig, scalar
from nsa.toggles import TOGGLES, contradictions, read_values
from nsa.toggles import ToggleSet as _ToggleSet
from nsa.torch_env import TORCH_VARIABLES
from runbook.errors import UsageError, did_you_mean

__all__ = ["Scalar", "Settings", "config_keys", "parse_settings"]

Scalar = str | int | float | bool


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What `--set` asked for: environment variables by name, config keys by dotted path."""

    toggles: Mapping[str, str] = field(default_factory=dict)
    config_overrides: Mapping[str, Scalar] = field(default_factory=dict)


def config_keys() -> dict[str, Any]:
    """Every key of a trainer config as `section.key`, with the type that it takes."""
    keys: dict[str, Any] = {}
    for section, owner in TrainerConfig.model_fields.items():
        model = cast("type[BaseModel]", owner.annotation)
        for name, info in model.model_fields.items():
            kind: Any = info.annotation
            for rule in info.metadata:
                kind = Annotated[kind, rule]
            keys[f"{section}.{name}"] = kind
    return keys


def parse_settings(pairs: Sequence[str]) -> Settings:
    """Sort `KEY=VALUE` words into toggles and config keys.

    Raises UsageError that lists every word without `=`, unknown or repeated key, bad value and
    contradiction.
    """
    toggles: dict[str, str] = {}
    overrides: dict[str, Scalar] = {}
    problems: list[str] = []
    keys = config_keys()
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator or not name:
            problems.append(f"--set {pair!r}: expected KEY=VALUE")
        elif name in toggles or name in overrides:
            problems.append(f"--set {name}: given twice")
        elif name in TOGGLES or name in TORCH_VARIABLES:
            toggles[name] = value
        elif name in keys:
            overrides[name] = scalar(value)
        else:
            problems.append(_unknown(name, keys))
    problems += _toggle_problems(toggles)
    problems += [_value_problem(name, keys[name], value) for name, value in overrides.items()]
    problems = [problem for problem in problems if problem]
    if problems:
        raise UsageError(problems)
    return Settings(toggles=toggles, config_overrides=overrides)


def _unknown(name: str, keys: Mapping[str, Any]) -> str:
    known = [*TOGGLES, *TORCH_VARIABLES, *keys]
    hint = did_you_mean(name, known) or "; see `runbook toggles`, or use section.key of a config"
    return f"--set {name}: no such toggle or config key{hint}"


def _toggle_problems(toggles: Mapping[str, str]) -> list[str]:
    values, problems = read_values(toggles)
    merged = {name: values.get(name, row.default) for name, row in TOGGLES.items()}
    chosen = _ToggleSet(values=merged, sources=dict.fromkeys(values, "--set"))
    return [f"--set {problem}" for problem in problems + contradictions(chosen)]


def _value_problem(name: str, kind: Any, value: Scalar) -> str:
    try:
        TypeAdapter(kind, config=ConfigDict(strict=True)).validate_python(value)
    except ValidationError as error:
        return f"--set {name}: {error.errors()[0]['msg']}, got {value!r}"
    return ""
