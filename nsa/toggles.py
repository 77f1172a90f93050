"""Every `NSA_*` variable there is, in one table; nothing else in the program reads them.

The trainer, env.json, the command line of the runbook and the documentation are all fed from
`TOGGLES`, whose rows are in toggles.yaml. A name that is not in the table, or a value its row does
not allow, is an error that lists everything wrong. Torch-free.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from nsa.contract import NSAError, did_you_mean, raise_problems
from nsa.strict_yaml import shipped

Kind = Literal["bool", "int", "float", "choice"]
Value = bool | int | float | str | None
Reader = Literal["trainer", "watchdog", "tests"]

PREFIX = "NSA_"
# The word that leaves a choice to the trainer.
AUTO = "auto"
_WORDS = dict.fromkeys(("1", "true", "on", "yes"), True) | dict.fromkeys(
    ("0", "false", "off", "no"), False
)


@dataclass(frozen=True)
class Toggle:
    """One row: what the variable means, what it may hold, which requirements ask for it.

    default None means that the config file decides. `choices`: all words of a choice, and what a
    yes/no toggle may be beside these two. `arm`: may change between the blocks of one launch.
    `reader`: which part of the program acts on it. `passive`: it switches logging, watching or a
    limit, so that its absence changes no number. `config_key`: what it goes over in the config.
    `needs`: what others have to be where it is on. `unavailable`: why no machine can have it.
    """

    kind: Kind
    name: str
    default: Value
    meaning: str
    requirement: str = "-"
    choices: Sequence[str] = ()
    minimum: float = 0
    maximum: float = sys.float_info.max
    arm: bool = False
    reader: Reader = "trainer"
    passive: bool = False
    config_key: str = ""
    needs: Mapping[str, Value] = field(default_factory=dict)
    unavailable: str = ""

    def allowed(self) -> str:
        """The allowed values, for messages and tables."""
        if self.kind == "bool":
            return ", ".join(("0", "1", *self.choices)) if self.choices else "0 or 1"
        if self.kind == "choice":
            return ", ".join(self.choices)
        what = "a whole number" if self.kind == "int" else "a number"
        if self.maximum == sys.float_info.max:
            return f"{what} >= {self.minimum:g}"
        return f"{what} in {self.minimum:g} .. {self.maximum:g}"

    def parse(self, text: str) -> Value:
        """Read a value as typed by a person. Raises NSAError with the allowed values."""
        value = self._convert(text.strip())
        if value is None:
            own = "config's value" if self.default is None else f"default {self.default!r}"
            raise NSAError(
                f"{self.name}={text!r}: allowed is {self.allowed()} ({self.meaning}); "
                f"unset it to use the {own}"
            )
        return value

    def _convert(self, text: str) -> Value:
        word = text.lower()
        if self.kind == "choice" or word in self.choices:
            return word if word in self.choices else None
        if self.kind == "bool":
            return _WORDS.get(word)
        try:
            number = int(text) if self.kind == "int" else float(text)
        except ValueError:
            return None
        return number if self.minimum <= number <= self.maximum else None


_TABLE = shipped(Path(__file__).with_suffix(".yaml"))
TOGGLES = {name: Toggle(name=name, **row) for name, row in _TABLE.items()}
ARM_TOGGLES: tuple[str, ...] = tuple(row.name for row in TOGGLES.values() if row.arm)


@dataclass(frozen=True, kw_only=True)
class ToggleSet:
    """The values in force. `sources` has a name only where something set it explicitly."""

    values: Mapping[str, Value]
    sources: Mapping[str, str]

    def flag(self, name: str) -> bool:
        """Value of a yes/no toggle; an unset one that the config decides reads False.

        One that is "auto" is not off.
        """
        return bool(self.values[name])

    def number(self, name: str) -> float:
        """Value of a numeric toggle that has a default."""
        value = self.values[name]
        if not isinstance(value, (int, float)):
            raise TypeError(f"{name} has no number: {value!r}")
        return value

    def text(self, name: str) -> str:
        """Value of a choice."""
        return str(self.values[name])

    def is_set(self, name: str) -> bool:
        """Was it given, rather than left at its default?"""
        return name in self.sources

    def replaced(self, changes: Mapping[str, Value], source: str) -> ToggleSet:
        """The same set with some values changed (an arm of a schedule, the safe mode)."""
        return ToggleSet(
            values={**self.values, **changes},
            sources={**self.sources, **dict.fromkeys(changes, source)},
        )

    def describe(self) -> list[dict[str, Value]]:
        """Rows for env.json of those that were set: name, value, default, source."""
        return [
            {
                "name": row.name,
                "value": self.values[row.name],
                "default": row.default,
                "source": self.sources[row.name],
            }
            for row in TOGGLES.values()
            if self.is_set(row.name)
        ]


def parse_toggles(variables: Mapping[str, str]) -> ToggleSet:
    """Read every `NSA_*` name of `variables`.

    Raises NSAError that lists every unknown name (with the nearest known one), every bad value
    and every contradiction.
    """
    values, problems = read_values(variables)
    toggles = toggle_set(values, dict.fromkeys(values, "environment"))
    problems += contradictions(toggles)
    raise_problems("NSA_* variables", problems)
    return toggles


def toggle_set(values: Mapping[str, Value], sources: Mapping[str, str]) -> ToggleSet:
    """These values, every other toggle at its default; nothing is checked."""
    merged = {row.name: values.get(row.name, row.default) for row in TOGGLES.values()}
    return ToggleSet(values=merged, sources=sources)


def read_values(variables: Mapping[str, str]) -> tuple[dict[str, Value], list[str]]:
    """The values given for known toggles, and a line for everything that is wrong."""
    values: dict[str, Value] = {}
    problems: list[str] = []
    for name in sorted(name for name in variables if name.startswith(PREFIX)):
        if name not in TOGGLES:
            hint = did_you_mean(name, TOGGLES) or "; see `runbook toggles` for all names"
            problems.append(f"{name}: no such toggle{hint}")
            continue
        try:
            values[name] = TOGGLES[name].parse(variables[name])
        except NSAError as error:
            problems.append(str(error))
    return values, problems


SAFE_MODE: dict[str, Value] = {**TOGGLES["NSA_DDP_SAFE_MODE"].needs, "NSA_SDPA_NO_FLASH": True}
# What this build never does, on whatever machine, and why.
UNAVAILABLE = {name: row.unavailable for name, row in TOGGLES.items() if row.unavailable}
# What runs on CUDA devices only, as it is set, and why.
NEEDS_CUDA = {
    "NSA_CUDA_GRAPHS=1": "CUDA graphs need a CUDA device",
    "NSA_USE_TRITON_SEL=1": "its kernels need a CUDA device",
}


@dataclass(frozen=True, kw_only=True)
class Conflict:
    """Two toggles that cannot both hold: `one` is set and needs `other` to be `needs`."""

    one: str
    other: str
    needs: str
    text: str


def conflicts(toggles: ToggleSet) -> list[Conflict]:
    """Every pair that cannot hold, in words that say where both values come from."""
    return [
        Conflict(one=one, other=other, needs=_word(needed), text=_conflict(toggles, one, other))
        for one, row in TOGGLES.items()
        for other, needed in row.needs.items()
        if toggles.values[one] in (True, "1")
        and toggles.is_set(other)
        # What is `auto` gives way by itself.
        and toggles.values[other] not in (needed, AUTO)
    ]


def _conflict(toggles: ToggleSet, one: str, other: str) -> str:
    first, second = (f"{n}={_word(toggles.values[n])} ({toggles.sources[n]})" for n in (one, other))
    return f"{first} and {second} exclude each other"


def _word(value: Value) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def meaning(name: str, variables: Mapping[str, str]) -> Value:
    """What a variable means in this environment: a toggle that is not given has its default.

    A value that a toggle cannot hold, and that of another variable, is the text itself.
    """
    text, toggle = variables.get(name), TOGGLES.get(name)
    if toggle is None:
        return text
    try:
        return toggle.default if text is None else toggle.parse(text)
    except NSAError:
        return text


def safe_mode_changes(variables: Mapping[str, str]) -> dict[str, str]:
    """What the safe mode changes of these variables, as text."""
    return {
        name: _word(value) for name, value in SAFE_MODE.items() if meaning(name, variables) != value
    }


def contradictions(toggles: ToggleSet) -> list[str]:
    """The conflicts as lines for a message."""
    return [f"{found.text}; unset one of the two" for found in conflicts(toggles)]


def with_safe_mode(toggles: ToggleSet) -> ToggleSet:
    """The set with NSA_DDP_SAFE_MODE's consequences spelled out."""
    if not toggles.flag("NSA_DDP_SAFE_MODE"):
        return toggles
    return toggles.replaced(SAFE_MODE, "NSA_DDP_SAFE_MODE")
