"""Checks of what comes in. Each failure is one message that names every problem found."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from runbook.errors import UsageError

__all__ = ["FloatArray", "between", "paired", "positive"]

FloatArray = npt.NDArray[np.float64]


def positive(name: str, values: Iterable[float], *, unit: str, at_least: int = 1) -> FloatArray:
    """`values` as a 1-D float array of finite numbers above zero.

    Raises:
        UsageError: not numbers, too few of them, NaN, infinite, zero or negative; names the
            first position of each problem.
    """
    try:
        array = np.asarray(
            values if isinstance(values, np.ndarray) else list(values), dtype=np.float64
        )
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name}: not a list of numbers in {unit} ({error})") from error
    problems = []
    if array.ndim != 1 or array.size < at_least:
        problems.append(f"{name}: needs at least {at_least} value(s) in {unit}, got {array.size}")
    for label, bad in (
        ("not finite", ~np.isfinite(array)),
        ("not above 0", np.isfinite(array) & (array <= 0)),
    ):
        where = np.flatnonzero(bad)
        if where.size:
            problems.append(
                f"{name}: {where.size} value(s) {label}, first at position {where[0]}"
                f" ({array.flat[where[0]]}); allowed: finite {unit} above 0"
            )
    if problems:
        raise UsageError(problems)
    return array


def paired(
    names: tuple[str, str], a: Iterable[float], b: Iterable[float], *, unit: str
) -> tuple[FloatArray, FloatArray]:
    """Two positive arrays of one length; entry i of both comes from the same round.

    Raises:
        UsageError: as `positive`, or the lengths differ.
    """
    first, second = positive(names[0], a, unit=unit), positive(names[1], b, unit=unit)
    if first.size != second.size:
        raise UsageError(
            f"{names[0]} has {first.size} value(s) and {names[1]} {second.size}: they are paired"
            " by round, so both need one value per round; leave incomplete rounds out"
        )
    return first, second


def between(name: str, value: float, low: float, high: float) -> float:
    """`value` if low < value < high.

    Raises:
        UsageError: outside, or not a number.
    """
    if not (math.isfinite(value) and low < value < high):
        raise UsageError(f"{name} is {value}; allowed: above {low} and below {high}")
    return value
