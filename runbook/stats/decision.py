"""A decision with the evidence for it, and the checks of the numbers that it is made from.

Did the machine keep one pace while arms took turns on it? A neighbor that comes and goes slows
whole stretches of steps of whatever arm has its turn. Then rounds are no independent evidence, and
a difference between arms may be the neighbor's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from runbook.errors import UsageError
from runbook.records.outcome import Outcome
from runbook.stats.throughput import MAD_TO_SIGMA

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


def percent(ratio: float, bounds: tuple[float, float], *beside: str) -> str:
    """`-1.2% (-3.0% to +0.6%, 8 rounds)`: how far a ratio and its bounds are from 1."""
    low, high = (f"{bound - 1:+.1%}" for bound in bounds)
    return f"{ratio - 1:+.1%} ({', '.join([f'{low} to {high}', *beside])})"


def of_ratio(
    outcome: Decided,
    ratio: float,
    bounds: tuple[float, float],
    *,
    error: float,
    n: int,
    reason: str,
    go_on: bool = False,
) -> Decision:
    """A decision about the ratio of two throughputs."""
    return Decision(
        outcome=outcome,
        estimate=ratio,
        interval=bounds,
        error_rate=error,
        n=n,
        unit="ratio",
        reason=reason,
        go_on=go_on,
    )


def positive(name: str, values: Iterable[float], *, unit: str) -> FloatArray:
    """`values` as a 1-D float array of finite numbers above zero.

    Raises:
        UsageError: no value, or one that is NaN, infinite, zero or negative.
    """
    array = np.asarray(values if isinstance(values, np.ndarray) else list(values), dtype=np.float64)
    bad = int((~(np.isfinite(array) & (array > 0))).sum())
    if array.ndim != 1 or not array.size or bad:
        text = f"{name}: {bad} of {array.size} value(s) are not finite and above 0"
        raise UsageError(text, hint=f"needed: at least 1 value in {unit}")
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


# A single slow step is no stretch: the pace is the median of so many steps.
STRETCH = 5
# The middle of the paces must lie within so many deviations of a step, or within the least spread.
MIDDLE = (0.1, 0.9)
DEVIATIONS = 3.8
LEAST_SPREAD = 0.05
# The noise of a step is that of quiet blocks: a neighbor also makes steps erratic.
QUIET = 0.25
# Steps follow each other's pace: their differences are smaller than independent ones would be
# (correlation 0.6, as measured on quiet machines).
CORRELATION = 0.6


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How far the paces of stretches lie apart, and how far they may; both as shares."""

    spread: float
    allowed: float

    @property
    def changed(self) -> bool:
        """The machine ran at more than one pace."""
        return self.spread > self.allowed

    def __str__(self) -> str:
        return f"paces {self.spread:.0%} apart, {self.allowed:.0%} allowed"


def pace_of(times: FloatArray) -> Pace:
    """Spread of the pace over all blocks, held against the noise of neighboring steps.

        x = log t - median over the arm - median over the position in the block
        spread = exp(q90 - q10 of the medians of 5 steps of x) - 1
        allowed = max(5 %, exp(3.8 sigma) - 1)

    Sigma comes from the differences of neighboring steps (median of a block, the quartile of the
    quietest blocks), so a level that changes between stretches is not part of it.

    Args:
        times: seconds per counted step, [rounds, arms, steps], finite and above 0.
    """
    x = np.log(times)
    x = x - np.median(x, axis=(0, 2), keepdims=True)
    x = x - np.median(x, axis=(0, 1), keepdims=True)
    width = min(STRETCH, x.shape[2])
    paces = np.median(np.lib.stride_tricks.sliding_window_view(x, width, axis=2), axis=-1)
    low, high = np.quantile(paces, MIDDLE)
    apart = np.median(np.abs(np.diff(x, axis=2)), axis=2) if width > 1 else np.zeros(1)
    sigma = MAD_TO_SIGMA * float(np.quantile(apart, QUIET)) / math.sqrt(2 * (1 - CORRELATION))
    allowed = max(LEAST_SPREAD, math.expm1(min(DEVIATIONS * sigma, 10.0)))
    return Pace(spread=float(np.expm1(high - low)), allowed=allowed)


# Answers that say that the arms differ, or how little they do.
_SAYS_SOMETHING = (Decided.WINNER, Decided.KEEP, Decided.DROP)


def unless_disturbed(decision: Decision, times: FloatArray | None) -> Decision:
    """The decision; INCONCLUSIVE where it rests on a machine that changed its pace.

    Args:
        decision: from the first `decision.n` rounds.
        times: as in `pace_of`, of these rounds or more; None where there are no steps to look at.
    """
    if times is None or decision.outcome not in _SAYS_SOMETHING:
        return decision
    pace = pace_of(times[: decision.n])
    if not pace.changed:
        return decision
    said = f"{decision.outcome.value} is not believed ({decision.reason})"
    return replace(
        decision,
        outcome=Decided.INCONCLUSIVE,
        winner=None,
        reason=f"{said}: the machine changed its pace under all arms, {pace}",
    )
