"""When a comparison may stop early: the plans that are published, and how one is followed.

The phases and the benchmark that publishes the error rates use these objects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from typing import TypeVar

from runbook.stats.decision import Decided, Decision


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
# As `nsa.tests.test_performance_guards` has it.
FASTER_PLAN = FixedPlan(units=7, error=0.01)
REGRESSION_PLAN = TwoStagePlan(first=3, more=15, suspicion=0.3, error=0.005)

Plan = InterimPlan | FixedPlan | TwoStagePlan
# By the question as the page of statistics has it.
PLANS: dict[str, Plan] = {
    "best arm, blocks": BUCKET_PLAN,
    "best arm, launches": BUCKET_LAUNCHES_PLAN,
    "fused AdamW, blocks": FUSED_PLAN,
    "fused AdamW, launches": FUSED_LAUNCHES_PLAN,
    "equal arms (A/A)": AA_PLAN,
    "scaling": SCALING_PLAN,
    "throughput target": TARGET_PLAN,
    "v2 faster": FASTER_PLAN,
    "nightly regression": REGRESSION_PLAN,
}


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


def is_decided(decision: Decision) -> bool:
    """Anything but INCONCLUSIVE."""
    return decision.outcome is not Decided.INCONCLUSIVE


def first_settled(
    rounds: int,
    plan: InterimPlan,
    analyze: Callable[[int, float], Decision],
    *,
    final: bool,
    settled: Callable[[Decision], bool] = is_decided,
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
        decision = replace(analyze(count, spend), error_rate=plan.error)
        if count == plan.max_rounds or settled(decision):
            return decision
    if final:
        return replace(analyze(rounds, plan.unspent(rounds)), error_rate=plan.error)
    coming = plan.analyses[len(reached)]
    return Decision(
        outcome=Decided.INCONCLUSIVE,
        error_rate=plan.error,
        n=rounds,
        unit="ratio",
        reason=f"undecided after {rounds} of at most {plan.max_rounds} rounds;"
        f" the next interim analysis is after {coming}",
        go_on=True,
        details={"next_analysis": coming, "max_rounds": plan.max_rounds},
    )
