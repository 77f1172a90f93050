"""Every number of a run that a check or a phase rests on, one row each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from runbook.records import Check, Measurement, RunRecord


@dataclass(frozen=True, kw_only=True)
class Number:
    """One number: `name` is a check's id, or phase/measurement.

    `measurement` names what was measured, `outcome` is the check's (empty without a check), and
    `limit` is a number that the value was held against by `comparator`. The windows are steps.
    What is no number, a text or a missing value, is None.
    """

    name: str
    phase: str
    measurement: str = ""
    outcome: str = ""
    required: bool = False
    value: float | None = None
    unit: str = ""
    stdev: float | None = None
    low: float | None = None
    high: float | None = None
    n: int = 0
    comparator: str = ""
    limit: float | None = None
    first_step: int | None = None
    last_step: int | None = None
    path: str = ""
    sha256: str = ""

    @property
    def number(self) -> float | None:
        """The value if it is finite."""
        return self.value if self.value is not None and math.isfinite(self.value) else None


def numbers_of(record: RunRecord) -> list[Number]:
    """The numbers of all checks and measurements, in the order of the phases; texts are no numbers.

    A measurement that a check already shows does not come twice.
    """
    found = (
        Number(**number_fields(name, phase.name, one, check))
        for phase in record.phases
        for name, one, check in phase.numbers()
    )
    return [one for one in found if one.value is not None]


def number_fields(
    name: str, phase: str, one: Measurement | None, check: Check | None
) -> dict[str, Any]:
    """The fields of a `Number`, by name."""
    return {"name": name, "phase": phase, **dict(_of_check(check)), **dict(_of_value(one))}


def _of_check(check: Check | None) -> Iterator[tuple[str, Any]]:
    if check is None:
        return
    yield "outcome", check.outcome.value
    yield "required", check.required
    if (limit := _float(check.limit)) is not None:
        yield "limit", limit
        yield "comparator", check.comparator.value


def _of_value(one: Measurement | None) -> Iterator[tuple[str, Any]]:
    if one is None:
        return
    yield "measurement", one.name
    yield "value", _float(one.value)
    for name in ("unit", "stdev", "n", "path", "sha256"):
        yield name, getattr(one, name)
    if one.interval:
        yield from zip(("low", "high"), one.interval, strict=True)
    if one.window:
        yield from one.window.model_dump().items()


def _float(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
