"""A preset: variables that belong together, each with its value and the requirement behind it.

The shipped ones are `configs/presets/*.yaml`. A profile that names one runs with its variables, so
that what is measured and what the documents launch have one owner.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from nsa.toggles import TOGGLES
from runbook.config.extends import merged, validated, whole_document
from runbook.config.profile import Sourced
from runbook.config.settings import variable_problems
from runbook.errors import UsageError, choice_for
from runbook.files import preset_names, presets_folder
from runbook.records.measurement import Record


class Preset(Record):
    """`config` is the trainer config that it is meant for, if not the profile's.

    `replaced` says of variables that the documents type what stands in their place. `commands`
    take it by its name, on a machine that it is for.
    """

    schema_version: Literal[1]
    name: str = Field(pattern=r"^[a-z0-9_]+$")
    title: str = Field(min_length=1)
    source: str = Field(min_length=1)
    config: str = ""
    commands: tuple[str, ...] = Field(min_length=1)
    env: dict[str, Sourced]
    replaced: dict[str, str] = Field(default_factory=dict)

    @property
    def variables(self) -> dict[str, str]:
        """The variables as an environment."""
        return {name: one.value for name, one in self.env.items()}

    @property
    def lines(self) -> list[str]:
        """What is typed to train with it."""
        return [f"runbook {command} --preset {self.name}" for command in self.commands]

    def meaning(self, name: str) -> str:
        """What a variable of it means: the toggle's own words, else what the preset says."""
        return TOGGLES[name].meaning if name in TOGGLES else self.env[name].meaning


def load_preset(name: str) -> Preset:
    """A shipped preset. Raises UsageError that lists every wrong key and value."""
    names = preset_names()
    if name not in names:
        raise UsageError(f"no preset {name!r}{choice_for(name, names)}")
    document = whole_document("preset", name, presets_folder())
    preset = validated(Preset, document, f"preset {name}")
    if problems := variable_problems(preset.variables):
        raise UsageError([f"preset {name}: {text}" for text in problems])
    return preset


def with_preset(document: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A profile's document with the variables of the preset that it names, below those of its own.

    Raises UsageError for a name that is none.
    """
    rest = {key: value for key, value in document.items() if key != "preset"}
    named = document.get("preset")
    if named is None:
        return rest
    if not isinstance(named, str):
        raise UsageError(f"{where}: preset: expected the name of a preset, got {named!r}")
    own = rest.get("env") or {}
    variables = load_preset(named).model_dump(mode="json")["env"]
    return {**rest, "env": merged(variables, own) if isinstance(own, dict) else own}
