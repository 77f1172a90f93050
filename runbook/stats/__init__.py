"""Statistics of one training.csv, with window and provenance, and decisions at a declared error.

What enters is pure (no files, no clock, no randomness) and has its error rate on the page of
statistics; one value is the throughput of one block or launch, tokens over time, no mean of rates.

Here: a decision with the evidence for it, the numbers that it is made from, and when it may be
made. Did the machine keep one pace while arms took turns on it? A neighbor that comes and goes
slows whole stretches of steps of whatever arm has its turn. Then rounds are no independent
evidence, and a difference between arms may be the neighbor's.

A comparison may stop early by a published plan: the phases and the benchmark that publishes the
error rates use these objects.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from random import Random
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from runbook.errors import UsageError
from runbook.records.measurement import TOKENS_PER_SECOND
from runbook.records.outcome import Outcome

MAD_TO_SIGMA = 1.4826


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
        estimate: the estimated quantity; None where there is too little data.
        interval: lower and upper bound; each is one-sided at the declared error unless the
            function says otherwise, so together they make a 1 - 2 * error interval.
        n: independent units of evidence (rounds, launches, pairs, batches or rows).
        reason: one sentence for people.
        go_on: True if more data of the same plan is to be taken before the answer is final.
        details: further numbers, by name.
    """

    outcome: Decided
    winner: str | None = None
    estimate: float | None = None
    interval: tuple[float, float] | None = None
    n: int
    reason: str
    go_on: bool = False
    details: Mapping[str, float | None] = field(default_factory=dict)


def too_few(n: int, things: str, needed: int, **known: Any) -> Decision:
    """INCONCLUSIVE, because there is less than the question needs; `known` as in `Decision`."""
    reason = f"{n} {things}; at least {needed} are needed"
    return Decision(outcome=Decided.INCONCLUSIVE, reason=reason, n=n, **known)


FloatArray = npt.NDArray[np.float64]
# Numbers as whoever asks has them.
Values = Sequence[float] | FloatArray


def percent(ratio: float, bounds: tuple[float, float], *beside: str) -> str:
    """`-1.2% (-3.0% to +0.6%, 8 rounds)`: how far a ratio and its bounds are from 1."""
    low, high = (f"{bound - 1:+.1%}" for bound in bounds)
    return f"{ratio - 1:+.1%} ({', '.join([f'{low} to {high}', *beside])})"


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
    names: tuple[str, str], a: Iterable[float], b: Iterable[float]
) -> tuple[FloatArray, FloatArray]:
    """Throughputs of two arms, arrays of one length; entry i of both comes from the same round.

    Raises:
        UsageError: as `positive`, or the lengths differ.
    """
    first, second = (
        positive(n, v, unit=TOKENS_PER_SECOND) for n, v in zip(names, (a, b), strict=True)
    )
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


# -- when a comparison may stop early --------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class InterimPlan:
    """Interim analyses fixed before the first number is seen, so that stopping early stays honest.

    After `analyses[i]` rounds a decision may be made with error `spends()[i]`; the shares add up
    to `error`, so the chance of a wrong answer at any of them is at most `error` (union bound: it
    needs no model of how the analyses depend on each other).

    Attributes:
        analyses: numbers of rounds, rising, each at least 3; the last is the most ever run.
        error: the declared error of the whole plan.
        keep_at_end: only the last analysis may keep a variant, and has all of the error for it.
            What happens now and then is not seen in a few rounds: a stall in a tenth of them
            stays out of the first 8 in 43 % of the runs, out of 30 in 4 %.
        power: the share spent by an analysis grows as (rounds / last) ** power: 1 spends evenly,
            more than 1 keeps error for later, when there is more data.
    """

    analyses: tuple[int, ...]
    error: float = 0.01
    power: float = 1.0
    keep_at_end: bool = False

    @property
    def max_rounds(self) -> int:
        """Rounds at the last analysis."""
        return self.analyses[-1]

    def spends(self) -> tuple[float, ...]:
        """The error that each analysis may use; the sum is `error`."""
        reached = [0.0, *((rounds / self.max_rounds) ** self.power for rounds in self.analyses)]
        return tuple(self.error * (now - before) for before, now in pairwise(reached))

    def due(self, rounds: int) -> tuple[int, ...]:
        """The analyses that `rounds` complete rounds have reached."""
        return tuple(count for count in self.analyses if count <= rounds)

    def unspent(self, rounds: int) -> float:
        """Error left for a last analysis, where a run ended before the plan did."""
        pairs = zip(self.analyses, self.spends(), strict=True)
        return sum(share for count, share in pairs if count >= rounds)


@dataclass(frozen=True, kw_only=True)
class FixedPlan:
    """One analysis of `units` launches or blocks, fewer of which decide nothing close."""

    units: int
    error: float


@dataclass(frozen=True, kw_only=True)
class TwoStagePlan:
    """`first` rounds every time; `more` only if one-sided p is below `suspicion` after them."""

    first: int
    more: int
    suspicion: float
    error: float


# All were chosen with benchmarks/decisions; benchmarks/results/decisions.md has the rates.
BUCKET_PLAN = InterimPlan(analyses=(4, 6, 8, 12, 18, 24), error=0.01, power=1.0)
# Of one launch per arm and round.
BUCKET_LAUNCHES_PLAN = InterimPlan(analyses=(4,), error=0.01)
FUSED_PLAN = InterimPlan(analyses=(8, 12, 16, 24, 30), error=0.05, power=1.5, keep_at_end=True)
FUSED_LAUNCHES_PLAN = InterimPlan(analyses=(4,), error=0.05)
# Two equal arms under two names, either of which may look better.
AA_PLAN = InterimPlan(analyses=(4, 6, 8, 12, 18, 24), error=0.0025, power=1.0)
# Almost all error is kept for the last analysis: with 5 pairs, as the shipped profiles launch them,
# every bit of power is needed. A run that ends after 3 pairs spends all of it there.
SCALING_PLAN = InterimPlan(analyses=(3, 4, 5), error=0.01, power=10.0)
TARGET_PLAN = FixedPlan(units=3, error=0.05)
REGRESSION_PLAN = TwoStagePlan(first=3, more=15, suspicion=0.3, error=0.005)


Arm = TypeVar("Arm")


def balanced_rounds(
    arms: Sequence[Arm], rounds: int, random: Random, *, ordered_first: bool = False
) -> tuple[tuple[Arm, ...], ...]:
    """The order of the arms in each round: a random one, then the same reversed, and so on.

    Two arms run as ABBA or BAAB. In each two rounds every arm's mean place is the same, so a
    linear drift cancels; which of them goes first is drawn anew, so that nothing periodic can
    side with an arm for long.

    Args:
        arms: at least one; each has one turn in a round.
        rounds: how many; an odd last one has no counterpart.
        random: where the orders come from.
        ordered_first: the first round keeps the order of `arms`.
    """
    orders: list[tuple[Arm, ...]] = []
    while len(orders) < rounds:
        order = list(arms)
        if orders or not ordered_first:
            random.shuffle(order)
        orders += [tuple(order), tuple(reversed(order))]
    return tuple(orders[:rounds])


def first_settled(
    rounds: int,
    plan: InterimPlan,
    analyze: Callable[[int, float], Decision],
    *,
    final: bool,
    settled: Callable[[Decision], bool] = lambda one: one.outcome is not Decided.INCONCLUSIVE,
) -> Decision:
    """Repeat all analyses that `rounds` complete rounds have reached.

    Args:
        rounds: complete rounds so far.
        plan: the analyses and the error each may spend.
        analyze: decides on the first so many rounds at that error.
        final: no more rounds will come, so what error is left is spent on a last analysis.
        settled: whether a decision before the last analysis ends the run.

    Returns:
        The first settled decision, or that of the last analysis; before it INCONCLUSIVE with
        `go_on` and without estimate, so that nobody acts on a number between two analyses.
    """
    reached = plan.due(rounds)
    for count, spend in zip(reached, plan.spends(), strict=False):
        decision = analyze(count, spend)
        if count == plan.max_rounds or settled(decision):
            return decision
    if final:
        return analyze(rounds, plan.unspent(rounds))
    coming = plan.analyses[len(reached)]
    return Decision(
        outcome=Decided.INCONCLUSIVE,
        n=rounds,
        reason=f"undecided after {rounds} of at most {plan.max_rounds} rounds;"
        f" the next interim analysis is after {coming}",
        go_on=True,
    )
