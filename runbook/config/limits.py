"""Limits: a phase declares one in code, a profile gives it a value, and one function compares.

The declaration owns name, unit, comparator and meaning; the profile owns value, source and whether
it decides on that machine. Nothing else compares a number with a limit.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from pydantic import Field

from runbook.errors import choice_for
from runbook.records.measurement import Record
from runbook.records.outcome import Comparator

_HOLDS: dict[Comparator, Callable[[float, float], bool]] = {
    Comparator.AT_LEAST: operator.ge,
    Comparator.ABOVE: operator.gt,
    Comparator.AT_MOST: operator.le,
    Comparator.BELOW: operator.lt,
}


# A share of the devices' peak below which nobody trains: the clock, the counts or the machine are
# wrong, and a floor beneath it can catch nothing. A healthy trainer of 0.1 billion parameters uses
# 20 to 40 %, one that waits for its host 2 to 4 %.
IDLE_MFU = 0.01


class LimitValue(Record):
    """What a profile says of a limit. `gated` false: shown, never decides.

    Unit and comparator belong to the declaration (`LimitSpec`). A profile need not
    repeat them; one that does has to agree.
    """

    value: float = Field(allow_inf_nan=False)
    source: str = Field(min_length=1)
    gated: bool = True
    unit: str | None = None
    comparator: str | None = None


class LimitUse(StrEnum):
    """What a profile may do with a limit.

    A gate decides unless the profile only shows it (`gated: false`). An aim is always shown only.
    A rule is a part of how a decision is made, which a profile cannot switch off.
    """

    GATE = "gate"
    AIM = "aim"
    RULE = "rule"


@dataclass(frozen=True, kw_only=True)
class LimitSpec:
    """A limit as a phase declares it. `comparator` reads `value comparator limit`.

    `toggle` names the toggle that owns the value, where the trainer's watchdog uses it too: such a
    limit is set with the toggle and not in a profile. `timed`: it decides only where the profile
    lets throughputs decide.
    """

    name: str
    unit: str
    comparator: Comparator
    meaning: str
    use: LimitUse = LimitUse.GATE
    toggle: str = ""
    timed: bool = False

    def __post_init__(self) -> None:
        if self.comparator not in _HOLDS:
            raise ValueError(f"limit {self.name!r}: {self.comparator!r} compares no numbers")

    @property
    def floor(self) -> bool:
        """Is a higher value the better one?"""
        return self.comparator in (Comparator.AT_LEAST, Comparator.ABOVE)


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A limit in force: the declaration with a profile's value, source and `gated`."""

    spec: LimitSpec
    value: float
    source: str
    gated: bool

    def holds(self, value: float) -> bool:
        """Does the measured value keep to the limit? A NaN never does."""
        return not math.isnan(value) and _HOLDS[self.spec.comparator](value, self.value)

    def __str__(self) -> str:
        unit = f" {self.spec.unit}" if self.spec.unit else ""
        return f"{self.spec.comparator.value} {self.value:g}{unit}"


@dataclass(frozen=True, kw_only=True)
class FixedRule:
    """A rule with a number that is the same on every machine; `why` it is no profile's business."""

    what: str
    rule: str
    why: str


def limit_problems(
    given: Mapping[str, LimitValue],
    *,
    needed: Mapping[str, LimitSpec],
    known: Mapping[str, LimitSpec],
) -> list[str]:
    """What is wrong with a profile's limits: unknown, missing, or against their declaration."""
    problems = [
        f"limits.{name}: no such limit{choice_for(name, known)}"
        for name in given
        if name not in known
    ]
    problems += [
        f"limits.{name}: missing"
        for name, spec in needed.items()
        if name not in given and not spec.toggle
    ]
    for name, value in given.items():
        if name in known and known[name].toggle:
            problems.append(
                f"limits.{name}: set {known[name].toggle} instead, which owns the value"
            )
        elif name in known:
            problems += [f"limits.{name}.{text}" for text in _against(known[name], value)]
    return problems


def _against(spec: LimitSpec, given: LimitValue) -> list[str]:
    problems = []
    if given.comparator is not None and given.comparator != spec.comparator.value:
        wanted = f"this limit is declared {spec.comparator.value!r}"
        problems.append(f"comparator: {wanted}, got {given.comparator!r}; leave the key out")
    if given.unit is not None and given.unit != spec.unit:
        wanted = f"this limit is declared in {spec.unit!r}"
        problems.append(f"unit: {wanted}, got {given.unit!r}; leave the key out")
    if spec.use is LimitUse.AIM and given.gated:
        problems.append("gated: this is an aim, which never decides; expected false")
    if spec.use is LimitUse.RULE and not given.gated:
        problems.append("gated: this is a part of a rule and cannot be shown only; expected true")
    return problems
