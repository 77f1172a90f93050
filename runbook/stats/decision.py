"""A decision with the evidence for it, and the checks of the numbers that it is made from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from runbook.errors import UsageError
from runbook.records.outcome import Outcome

Detail = str | int | float | bool | None | list["Detail"] | dict[str, "Detail"]


class Decided(StrEnum):
    """What a decision says: nobody has to read it out of the `reason`."""

    WINNER = "WINNER"
    TIE = "TIE"
    KEEP = "KEEP"
    DROP = "DROP"
    PASS = "PASS"  # noqa: S105 - a verdict, not a secret
    FAIL = "FAIL"
    INVALID = "INVALID"
    INCONCLUSIVE = "INCONCLUSIVE"

    @property
    def as_check(self) -> Outcome:
        """The outcome of the check that asked.

        WINNER, TIE, KEEP and DROP say what to choose; a choice that could be made is a PASS.
        """
        return Outcome.PASS if self in _CHOICES else Outcome(self.value)


_CHOICES = frozenset(map(Decided, ("WINNER", "TIE", "KEEP", "DROP")))


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The outcome of one question with the evidence for it.

    Attributes:
        outcome: what is decided.
        winner: the arm to use, only with WINNER.
        estimate: the estimated quantity, in `unit`; None where there is too little data.
        interval: lower and upper bound; each is one-sided at `error_rate` unless the function
            says otherwise, so together they make a 1 - 2 * error_rate interval.
        error_rate: the declared chance of the wrong answer at the limit in question.
        n: independent units of evidence (rounds, launches, pairs, batches or rows).
        unit: unit of estimate and interval ("ratio", "tok/s", "share", "MiB").
        reason: one sentence for people.
        go_on: True if more data of the same plan is to be taken before the answer is final.
        details: further numbers, JSON-able.
    """

    outcome: Decided
    winner: str | None = None
    estimate: float | None = None
    interval: tuple[float, float] | None = None
    error_rate: float
    n: int
    unit: str
    reason: str
    go_on: bool = False
    details: Mapping[str, Detail] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Detail]:
        """A plain dictionary that `json.dumps` takes as it is."""
        return {
            **vars(self),
            "outcome": self.outcome.value,
            "interval": None if self.interval is None else list(self.interval),
            "details": dict(self.details),
        }


def too_few(
    n: int,
    things: str,
    needed: int,
    *,
    error: float,
    unit: str,
    go_on: bool = False,
    details: Mapping[str, Detail] | None = None,
) -> Decision:
    """INCONCLUSIVE, because there is less than the question needs."""
    return Decision(
        outcome=Decided.INCONCLUSIVE,
        error_rate=error,
        n=n,
        unit=unit,
        reason=f"{n} {things}; at least {needed} are needed",
        go_on=go_on,
        details=details or {},
    )


FloatArray = npt.NDArray[np.float64]


def positive(name: str, values: Iterable[float], *, unit: str) -> FloatArray:
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
    if array.ndim != 1 or array.size < 1:
        problems.append(f"{name}: needs at least 1 value(s) in {unit}, got {array.size}")
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
