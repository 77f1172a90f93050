"""Whose value a variable of a run has: the one owner of that order.

A later layer wins: the profile, a preset, the caller's shell, `--set`. What a person gave, in
whichever layer, is kept with its source, so that a run can be repeated from its record alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from filecmp import cmp
from pathlib import Path
from typing import TYPE_CHECKING

from nsa import torch_env
from nsa.contract import CONFIG_VARIABLE, is_secret_name
from nsa.toggles import PREFIX, meaning, safe_mode_changes
from runbook import BOARD, BOARD_TOGGLE, absent, is_installed
from runbook.config import Profile
from runbook.config.settings import (
    Settings,
    environment_notes,
    is_of_shell,
    is_passed_on,
    is_variable,
    may_be_set,
    unknown_note,
    variable_problems,
)
from runbook.errors import UsageError, not_one_line
from runbook.files import data_path
from runbook.records.own_trainer import OwnTrainer

if TYPE_CHECKING:
    from runbook.config.extends import Preset

TYPED = "--set"
SHELL = "shell"
PRESET = "preset"
SAFE_MODE = "NSA_DDP_SAFE_MODE"
# In every shell of NVIDIA's CUDA images: which package of NCCL they hold. No library reads it, and
# a run in such an image has changed no setting.
_PACKAGE = "NCCL_VERSION"


@dataclass(frozen=True, kw_only=True)
class _Layer:
    source: str
    values: Mapping[str, str]
    config: str = ""


def shell_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of a shell that are settings of a run, sorted by name.

    What a launch gets from its machine anyway (CUDA_VISIBLE_DEVICES, HF_HOME) is none,
    and what has the name of a secret must not be written down.
    """
    return {
        name: value
        for name, value in sorted(environ.items())
        if _is_setting(name)
        and not is_passed_on(name)
        and not is_secret_name(name)
        and (value or name != CONFIG_VARIABLE)
    }


def _is_setting(name: str) -> bool:
    if name == _PACKAGE:
        return False
    return name.startswith(PREFIX) or is_variable(name) or name == CONFIG_VARIABLE


def dropped(environ: Mapping[str, str], own: OwnTrainer | None = None) -> str:
    """In one line, which variables of a shell no launch gets; empty if there are none.

    Only those that a launch could use: of the families that a plan or a profile may set. A trainer
    of one's `own` may read any name.
    """
    names = [
        name
        for name in sorted(environ)
        if (may_be_set(name) or (own and not is_of_shell(name) and name not in own.env))
        and not is_passed_on(name)
        and (not _is_setting(name) or is_secret_name(name))
    ]
    if not names:
        return ""
    where = "`env` below `trainer` of its profile (`init --env`)" if own else "a profile's env"
    return f"{', '.join(names)}: no launch gets them; {where} can set them"


def gathered(
    profile: Profile,
    typed: Settings,
    *,
    from_shell: Mapping[str, str],
    preset: Preset | None = None,
) -> Settings:
    """Everything that a person gave for this run, each with its source.

    The safe mode overrides what a lower layer sets against it; beside such a value of its own layer
    or of a higher one it is a contradiction, which planning refuses. Raises UsageError that lists
    every unknown variable and bad value of the shell.
    """
    in_shell = {name: value for name, value in from_shell.items() if name != CONFIG_VARIABLE}
    problems = [*variable_problems(in_shell)]
    if problem := not_one_line(from_shell.get(CONFIG_VARIABLE, "")):
        problems.append(f"{CONFIG_VARIABLE}: {problem}")
    if problems := [f"in this shell: {text}" for text in problems]:
        raise UsageError(problems)
    layers = [
        _Layer(source=SHELL, values=in_shell, config=from_shell.get(CONFIG_VARIABLE, "")),
        _Layer(source=TYPED, values=typed.toggles, config=typed.config),
    ]
    layers = [*_of_preset(preset), *layers] if preset is not None else layers
    toggles: dict[str, str] = {}
    sources: dict[str, str] = dict.fromkeys(typed.config_overrides, TYPED)
    config = ""
    for layer in layers:
        values = _by_todays_name(layer.values)
        overridden = _by_safe_mode(layer, profile, toggles)
        toggles |= {**overridden, **values}
        sources |= dict.fromkeys(overridden, f"safe mode ({layer.source})")
        sources |= dict.fromkeys(values, layer.source)
        if layer.config:
            config, sources[CONFIG_VARIABLE] = layer.config, layer.source
    return replace(typed, toggles=toggles, config=config and config_name(config), sources=sources)


def _of_preset(preset: Preset) -> Iterator[_Layer]:
    """What it sets, then what no launch can have of that, each with the reason."""
    named = f"{PRESET} {preset.name}"
    yield _Layer(source=named, values=preset.variables, config=preset.config)
    overridden = {"NSA_DISABLE_CSV_LOGS": "every number is read from training.csv"}
    if not is_installed(BOARD):
        overridden[BOARD_TOGGLE] = absent(BOARD)
    for name, why in overridden.items():
        if name in preset.variables:
            value = "1" if name == BOARD_TOGGLE else "0"
            source = f"over {named}, which has {preset.variables[name]}: {why}"
            yield _Layer(source=source, values={name: value})


def _by_todays_name(values: Mapping[str, str]) -> dict[str, str]:
    """An old name that stands alone is the new one, which a lower layer may have set."""
    alias = torch_env.ALIASES
    return {
        (alias[name] if name in alias and alias[name] not in values else name): value
        for name, value in values.items()
    }


def _by_safe_mode(layer: _Layer, profile: Profile, below: Mapping[str, str]) -> dict[str, str]:
    """What the layer's safe mode changes of what the layers below it set."""
    if meaning(SAFE_MODE, layer.values) is not True:
        return {}
    changes: dict[str, str] = {}
    for phase in profile.phases.values():
        under = {name: one.value for name, one in {**profile.env, **phase.env}.items()}
        changes |= safe_mode_changes({**under, **below})
    return {name: value for name, value in changes.items() if name not in layer.values}


def config_name(text: str) -> str:
    """A trainer config as a profile names it: a shipped one by its name, else the whole path."""
    path, name = Path(text), text.removeprefix("configs/")
    shipped = data_path("configs") / name
    if not path.is_file():
        return name if shipped.is_file() else text
    if shipped.is_file() and (shipped.samefile(path) or cmp(shipped, path, shallow=False)):
        return name
    return str(path.absolute())


def with_config(profile: Profile, config: str) -> Profile:
    """The profile with another trainer config, for all ranks and for one."""
    if config in ("", profile.config):
        return profile
    return profile.model_copy(update={"config": config, "config_single": config})


@dataclass(frozen=True, kw_only=True)
class Given:
    """A setting that a person gave; `before` is what it replaces, None where that is not known.

    `owner`: who has that, the profile or the config. `as_in_profile`: both mean the same.
    """

    name: str
    value: str
    source: str
    before: str | None
    as_in_profile: bool

    @property
    def text(self) -> str:
        """`NAME=VALUE`."""
        return f"{self.name}={self.value}"

    @property
    def owner(self) -> str:
        """`config` for a `section.key` of it, else `profile`."""
        return "config" if "." in self.name else "profile"


def given(
    settings: Mapping[str, str], sources: Mapping[str, str], profile: Mapping[str, str]
) -> Iterator[Given]:
    """Each setting with its source, beside the profile's variables and values of its config."""
    for name, value in settings.items():
        before = profile.get(name)
        same = before is not None and meaning(name, profile) == meaning(name, settings)
        source = sources.get(name, TYPED)
        yield Given(name=name, value=value, source=source, before=before, as_in_profile=same)


def told(
    settings: Mapping[str, str], sources: Mapping[str, str], profile: Mapping[str, str]
) -> Iterator[str]:
    """Each setting with its source and what it replaces of profile and config, in words."""
    notes = environment_notes(settings, uses_nccl=True)
    for one in given(settings, sources, profile):
        parts = [one.source]
        if one.before is not None:
            parts.append(
                f"as in the {one.owner}"
                if one.as_in_profile
                else f"the {one.owner} has {one.before}"
            )
        parts += [notes[one.name]] if one.name in notes else []
        yield f"{one.text} ({', '.join(parts)})"


def unread(profile: Profile) -> Iterator[str]:
    """Each variable of the profile that NCCL may ignore, with that note."""
    every = [profile.env, *(phase.env for phase in profile.phases.values())]
    values = {name: one.value for env in every for name, one in env.items()}
    for name, value in values.items():
        if note := unknown_note(name):
            yield f"{name}={value} (profile {profile.name}, {note})"
