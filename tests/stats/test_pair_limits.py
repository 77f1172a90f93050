"""Where the answers about pairs, targets and scaling turn, and what too little data says."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from scipy import stats

from runbook.errors import UsageError
from runbook.stats import (
    FUSED_PLAN,
    SCALING_PLAN,
    Decided,
    Decision,
    InterimPlan,
    positive,
)
from runbook.stats.arms import non_inferiority, regression
from runbook.stats.launches import below_level, loss_shown, meets_target, scaling


def once(error: float, n: int = 8) -> InterimPlan:
    """One analysis of so many rounds."""
    return InterimPlan(analyses=(n,), error=error)


ONCE = once(0.05)
SPREAD = np.array([-1.0, 1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0]) * 0.01
BASE = np.full(8, 100.0)


def shifted(log_ratio: float, n: int = 8, scale: float = 1.0) -> np.ndarray:
    return 100 * np.exp(scale * SPREAD[:n] + log_ratio)


def reach(error: float, n: int = 8) -> float:
    """Half-width of the one-sided bound of the mean of so many of SPREAD."""
    return float(stats.t.ppf(1 - error, n - 1) * stats.sem(SPREAD[:n]))


def test_three_pairs_are_needed() -> None:
    few = [100.0] * 2
    for decision in (non_inferiority(few, few, plan=ONCE), regression(few, few)):
        assert decision.reason == "2 round(s); at least 3 are needed"
        assert (decision.outcome, decision.n) == (Decided.INCONCLUSIVE, 2)
    assert regression(few, few).go_on
    three = [100.0, 100.1, 99.9]
    assert non_inferiority(three, three, plan=once(0.05, 3)).outcome is Decided.KEEP


def test_the_numbers_of_an_answer_are_those_of_a_paired_t_test() -> None:
    ratio, half = 0.01, reach(0.01)
    low, high = math.exp(ratio - half), math.exp(ratio + half)
    decision = non_inferiority(BASE, shifted(ratio), plan=once(0.01))
    assert decision.estimate == pytest.approx(math.exp(ratio))
    assert decision.interval == pytest.approx((low, high))
    assert decision.n == 8


@pytest.mark.parametrize(("shift", "outcome"), [(1e-5, "KEEP"), (-1e-5, "INCONCLUSIVE")])
def test_a_loss_of_two_and_a_half_margins_is_excluded_at_a_thousandth(
    shift: float, outcome: str
) -> None:
    """With a margin of 4 % the gross loss of 10 % decides once the noise is large."""
    scale = 10.0
    ratio = math.log(0.9) + scale * reach(0.001) + shift
    assert ratio - scale * reach(0.05) > math.log(0.96)
    decision = non_inferiority(BASE, shifted(ratio, scale=scale), plan=ONCE, margin=0.04)
    assert decision.outcome is Decided[outcome]


def test_all_of_the_error_is_kept_for_keeping_at_the_end() -> None:
    """Dropping may come at any analysis, so it has its share of the error only."""
    gaps = np.random.default_rng(7).normal(0, 0.005, FUSED_PLAN.max_rounds)
    base = np.full(gaps.size, 100.0)
    for at_end, n, errors in (
        (True, 30, (0.05, FUSED_PLAN.spends()[-1])),
        (False, 8, (FUSED_PLAN.spends()[0],) * 2),
    ):
        plan = replace(FUSED_PLAN, keep_at_end=at_end)
        kept = non_inferiority(base, base * np.exp(gaps), plan=plan)
        mean, bar = gaps[:n].mean(), stats.sem(gaps[:n])
        low, high = (stats.t.ppf(1 - error, n - 1) * bar for error in errors)
        assert (kept.outcome, kept.n) == (Decided.KEEP, n)
        assert kept.interval == pytest.approx((math.exp(mean - low), math.exp(mean + high)))


# A night's regression


@pytest.mark.parametrize(("shift", "go_on"), [(1e-5, False), (-1e-5, True)])
def test_a_loss_is_suspected_once_its_upper_70_percent_bound_is_below_one(
    shift: float, go_on: bool
) -> None:
    edge = -SPREAD[:3].mean() - reach(0.3, 3)
    decision = regression(BASE[:3], shifted(edge + shift, 3))
    assert decision.go_on is go_on
    assert decision.interval == pytest.approx(
        tuple(math.exp(-reach(0.3, 3) + shift + side * reach(0.005, 3)) for side in (-1, 1))
    )


def test_a_suspected_loss_waits_for_all_rounds() -> None:
    head = np.tile([94.0, 95.0, 96.0], 7)
    base = np.full(21, 100.0)
    waiting = regression(base[:17], head[:17])
    assert (waiting.go_on, waiting.n) == (True, 17)
    late = regression(base, head)
    assert (late.outcome, late.n, late.go_on) == (Decided.FAIL, 18, False)


# A target, from few launches and from many


@pytest.mark.parametrize(
    ("values", "outcome"),
    [
        ([115.0, 200.0], "PASS"),
        ([114.9, 200.0], "INCONCLUSIVE"),
        ([84.9, 10.0], "FAIL"),
        ([85.0, 10.0], "INCONCLUSIVE"),
    ],
)
def test_one_or_two_launches_have_to_be_fifteen_percent_away(
    values: list[float], outcome: str
) -> None:
    decision = meets_target(values, 100.0)
    assert (decision.outcome, decision.interval) == (Decided[outcome], None)
    assert decision.estimate == pytest.approx(stats.gmean(values))


@pytest.mark.parametrize(("side", "decided"), [(1, Decided.PASS), (-1, Decided.FAIL)])
def test_a_target_is_reached_by_the_lower_bound_and_missed_by_the_upper_one(
    side: int, decided: Decided
) -> None:
    half = reach(0.05)
    for target, outcome in ((1 - side * 1e-6, decided), (1 + side * 1e-6, Decided.INCONCLUSIVE)):
        decision = meets_target(shifted(side * half), 100 * target)
        assert decision.outcome is outcome
        ends = (100 * math.exp((side + end) * half) for end in (-1, 1))
        assert decision.interval == pytest.approx(tuple(ends))


def test_a_target_is_stale_under_half_of_what_is_measured() -> None:
    assert "STALE TARGET" not in meets_target([80.0] * 3, 40.0).reason
    assert "STALE TARGET" in meets_target([80.1] * 3, 40.0).reason


# Scaling


def efficiency(log_e: float, pairs: int = 6, **options: object) -> Decision:
    one = 100 * np.exp(0.5 * SPREAD[:pairs])
    many = 200 * np.exp(log_e - 0.5 * SPREAD[:pairs])
    return scaling(one, many, 2, **options)  # type: ignore[arg-type]


def scaling_reach(error: float, pairs: int = 6) -> float:
    """Ratio weighted 2/3, product 1/3 (here constant), freedom after Satterthwaite."""
    freedom = (pairs - 1) / ((2 / 3) ** 2 + (1 / 3) ** 2)
    bar = math.sqrt(2 / 3 * stats.sem(SPREAD[:pairs]) ** 2)
    return float(stats.t.ppf(1 - error, freedom) * bar)


@pytest.mark.parametrize(("side", "decided"), [(1, Decided.PASS), (-1, Decided.FAIL)])
def test_scaling_turns_at_its_bounds(side: int, decided: Decided) -> None:
    half = scaling_reach(0.01)
    for shift, outcome in ((side * 1e-6, decided), (-side * 1e-6, Decided.INCONCLUSIVE)):
        decision = efficiency(math.log(0.9) + side * half + shift)
        assert decision.outcome is outcome
        ends = (0.9 * math.exp(side * half + shift + end * half) for end in (-1, 1))
        assert decision.interval == pytest.approx(tuple(ends))


@pytest.mark.parametrize(("share", "outcome"), [(1.0499, "PASS"), (1.0501, "INVALID")])
def test_nothing_scales_by_more_than_five_percent_above_one(share: float, outcome: str) -> None:
    assert efficiency(math.log(share)).outcome is Decided[outcome]


@pytest.mark.parametrize(("pairs", "outcome"), [(2, "INCONCLUSIVE"), (3, "FAIL")])
def test_scaling_needs_three_pairs(pairs: int, outcome: str) -> None:
    decision = efficiency(math.log(0.5), pairs)
    assert decision.outcome is Decided[outcome]
    assert (decision.interval is None) is (pairs < 3)


def test_a_plan_of_scaling_that_ends_early_spends_what_is_left() -> None:
    ended = efficiency(math.log(0.9) + scaling_reach(0.01, 3) + 1e-6, 3, plan=SCALING_PLAN)
    assert ended.outcome is Decided.PASS


# Plans, and the numbers that enter


def test_what_is_unspent_is_the_share_of_the_analyses_still_to_come() -> None:
    plan = InterimPlan(analyses=(3, 4, 8), error=0.08)
    assert plan.spends() == pytest.approx((0.03, 0.01, 0.04))
    assert replace(plan, power=10.0).spends()[0] == pytest.approx(0.08 * (3 / 8) ** 10)
    left = [plan.unspent(rounds) for rounds in (1, 3, 4, 5, 8, 9)]
    assert left == pytest.approx([0.08, 0.08, 0.05, 0.04, 0.04, 0.0])
    assert [plan.due(rounds) for rounds in (2, 3, 7, 8)] == [(), (3,), (3, 4), (3, 4, 8)]


@pytest.mark.parametrize(("side", "decided"), [(1, Decided.KEEP), (-1, Decided.DROP)])
def test_keep_turns_at_the_lower_bound_and_drop_at_the_upper_one(
    side: int, decided: Decided
) -> None:
    for shift, outcome in ((1e-4, decided), (-1e-4, Decided.INCONCLUSIVE)):
        variant = 100 * np.exp(SPREAD + math.log(0.98) + side * (reach(0.05) + shift))
        assert non_inferiority(BASE, variant, plan=ONCE).outcome is outcome


GOOD = [1.0, 2.0, 3.0]
NOT_COUNTED = r"x: 4 of 5 value\(s\) are not finite and above 0; needed: at least 1 value in s"


@pytest.mark.parametrize(("call", "says"), [
    *((call, r"1 of \d value") for bad in (math.nan, math.inf, 0.0, -1.0) for call in (
        partial(non_inferiority, GOOD, [1.0, bad, 3.0], plan=ONCE),
        partial(regression, [1.0, bad, 3.0], GOOD),
        partial(meets_target, [1.0, bad, 3.0], 1.0), partial(meets_target, GOOD, bad),
        partial(scaling, GOOD, [1.0, bad, 3.0], 2), partial(below_level, GOOD, bad, allowance=0.05),
        partial(loss_shown, [1.0, bad], GOOD, allowance=0.05))),
    (partial(non_inferiority, [1.0, 2.0], [1.0], plan=ONCE), "paired by round"),
    (partial(meets_target, [], 1.0), "at least 1 value"),
    (partial(scaling, [1.0], [1.0], 1), "at least 2 devices"),
    (partial(scaling, [1.0], [1.0, 2.0], 2), r"t1 has 1 value\(s\) and tN 2: they are paired"),
    (partial(scaling, [1.0, 2.0], [1.0], 2), r"t1 has 2 value\(s\) and tN 1: they are paired"),
    (partial(positive, "x", [1.0, math.nan, -2.0, math.inf, 0.0], unit="s"), NOT_COUNTED),
    (partial(positive, "x", np.ones((2, 2)), unit="s"), "0 of 4 value"),
    (partial(positive, "x", [], unit="s"), "x: 0 of 0"),
])  # fmt: skip
def test_values_that_are_no_throughput_are_counted(call: Callable[[], Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        call()
