"""Documents that say `extends: NAME` and then only what differs: profiles, presets and plans.

A preset is variables that belong together, each with its value and the requirement behind it. The
shipped ones are `configs/presets/*.yaml`. A profile that names one runs with its variables, so that
what is measured and what the documents launch have one owner.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Any, Literal, TypeVar, get_args

from pydantic import BaseModel, Field, ValidationError
from pydantic_core import ErrorDetails

from nsa.strict_yaml import load_strict
from nsa.toggles import TOGGLES
from runbook.config import Sourced
from runbook.config.settings import variable_problems
from runbook.errors import UsageError, choice_for, did_you_mean, meant, shown
from runbook.files import data_path, is_file, read_given, shipped_names
from runbook.records.measurement import Record

M = TypeVar("M", bound=BaseModel)
# Of machines of any number of GPUs, those of so many are shown.
SHOWN_GPUS = 2
# Where a list is a command away, a near miss points there.
_LISTS = {"profile": "; all: `runbook profiles`"}


def locate(what: str, name_or_path: str, folder: Path, made: Iterable[str] = ()) -> Path:
    """The file of a document: a shipped one by name, or one's own by path.

    Raises UsageError that lists the shipped names, with those that are `made`.
    """
    if is_file(name_or_path):
        return Path(name_or_path)
    names = shipped_names(folder)
    if name_or_path not in names:
        raise _unknown(what, name_or_path, [*names, *made])
    return folder / f"{name_or_path}.yaml"


def _unknown(what: str, name: str, names: Sequence[str]) -> UsageError:
    near = _near(name, names)
    if near:
        return UsageError(f"no {what} {name!r}{near}{_LISTS.get(what, '')}")
    shown = ", ".join(sorted(one for one in names if gpus_by_name(one) <= SHOWN_GPUS))
    many = any(gpus_by_name(one) > SHOWN_GPUS for one in names)
    more = f"; x{SHOWN_GPUS} stands for more GPUs too" if many else ""
    return UsageError(
        f"no {what} {name!r}; there are: {shown}{more}; "
        "a file of your own needs a path ending in .yaml"
    )


def _near(name: str, names: Sequence[str]) -> str:
    """What may be meant: never a machine with fewer GPUs than were typed (`a100x2`, `2xa100`)."""
    swapped = re.sub(r"^(\d+)x([a-z]\w*)", r"\2x\1", name.lower())
    most = max(SHOWN_GPUS, gpus_by_name(swapped))
    fitting = [one for one in names if swapped and one.startswith(swapped)]
    fitting = [one for one in fitting if gpus_by_name(one) <= most]
    # Of a card by its whole name its own machines are nearer than those of its variants.
    own = [one for one in fitting if re.match(r"x\d", one[len(swapped) :])]
    if fitting:
        return meant(sorted(own or fitting, key=lambda one: (gpus_by_name(one), one)))
    return did_you_mean(name, [one for one in names if gpus_by_name(one) >= gpus_by_name(swapped)])


def gpus_by_name(name: str) -> int:
    """GPUs of a machine by the name of its profile, 0 where it has none."""
    found = re.search(r"x(\d+)", name)
    return int(found[1]) if found else 0


def whole_document(
    what: str,
    name_or_path: str,
    folder: Path,
    *,
    made: Mapping[str, Callable[[], dict[str, Any]]] = MappingProxyType({}),
    prepare: Callable[[dict[str, Any], Path], dict[str, Any]] = lambda document, _path: document,
    seen: tuple[str, ...] = (),
) -> dict[str, Any]:
    """The document with everything that it extends. Raises UsageError for an unreadable one.

    A name is that of a file in `folder`, or of a document that is `made`. `prepare` changes each
    one on the way before the one that extends it goes over it.
    """
    if name_or_path in seen:
        raise UsageError(f"{what}s extend each other in a circle: {' -> '.join(seen)}")
    if name_or_path in made:
        path, data = Path(name_or_path), made[name_or_path]()
    else:
        path = locate(what, name_or_path, folder, made)
        data = read_mapping(what, path)
    data = prepare(data, path)
    base = data.pop("extends", None)
    if base is None:
        return data
    if not isinstance(base, str):
        raise UsageError(f"{path}: extends: expected the name of a {what}, got {base!r}")
    seen = (*seen, name_or_path)
    below = whole_document(what, base, folder, made=made, prepare=prepare, seen=seen)
    return merged(below, data)


def read_mapping(what: str, path: Path) -> dict[str, Any]:
    """The keys of a YAML file. Raises UsageError, with the path, where it has none, or no text."""
    try:
        text = read_given(path).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{what} {str(path)!r} cannot be read: {reason}") from error
    data, problems = load_strict(text)
    if not problems and not isinstance(data, dict):
        problems = [f"expected a mapping of keys, got {type(data).__name__}"]
    if problems:
        raise UsageError([f"{path}: {problem}" for problem in problems])
    return dict(data)


def merged(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings are merged key by key, the rest (lists too) is replaced; null removes a key."""
    result = dict(base)
    if "value" in change and "source" in base:
        # The parent's reason does not stand beside another number.
        del result["source"]
    for key, value in change.items():
        if value is None:
            result.pop(key, None)
            continue
        old = result.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        result[key] = merged(dict(old or {}), value) if both else value
    return result


def validated(
    model: type[M],
    document: Mapping[str, Any],
    where: str,
    *,
    told: Callable[[ErrorDetails], str] | None = None,
) -> M:
    """The document as this model. Raises UsageError that lists every wrong key and value."""
    try:
        return model.model_validate_json(json.dumps(document), strict=True)
    except ValidationError as error:
        say = told or partial(key_problem, model=model)
        problems = dict.fromkeys(f"{where}: {say(detail)}" for detail in error.errors())
        raise UsageError([*problems]) from error


def key_problem(detail: ErrorDetails, model: type[BaseModel]) -> str:
    """One thing that pydantic objects to in a document of this model, with what is allowed."""
    place = ".".join(str(part) for part in detail["loc"]) or model.__name__.lower()
    if detail["type"] == "extra_forbidden":
        known = _fields_at(model, detail["loc"][:-1])
        near = did_you_mean(str(detail["loc"][-1]), known)
        return f"{place}: unknown key{near}; allowed: {', '.join(sorted(known))}"
    if detail["type"] == "missing":
        return f"{place}: missing"
    message = detail["msg"].removeprefix("Value error, ")
    got = "" if isinstance(detail["input"], dict) else f", got {shown(detail['input'])}"
    return f"{place}: {message}{got}"


def _fields_at(model: Any, location: tuple[int | str, ...]) -> list[str]:
    """Field names of the model that sits at `location` inside a document."""
    for part in location:
        if isinstance(model, type) and issubclass(model, BaseModel):
            field = model.model_fields.get(str(part))
            kind: Any = field.annotation if field else None
            # One that may also be None.
            either = get_args(kind) if isinstance(kind, UnionType) else ()
            model = next((one for one in either if one is not type(None)), kind)
        else:
            model = next(iter(get_args(model)[::-1]), None)
    is_model = isinstance(model, type) and issubclass(model, BaseModel)
    return list(model.model_fields) if is_model else []


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


def preset_names() -> tuple[str, ...]:
    """Names of the shipped presets, in alphabetical order."""
    return shipped_names(_presets())


def _presets() -> Path:
    return data_path("configs") / "presets"


def load_preset(name: str) -> Preset:
    """A shipped preset. Raises UsageError that lists every wrong key and value."""
    names = preset_names()
    if name not in names:
        raise UsageError(f"no preset {name!r}{choice_for(name, names)}")
    document = whole_document("preset", name, _presets())
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
