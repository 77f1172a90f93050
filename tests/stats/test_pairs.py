"""non_inferiority, regression, meets_target, scaling: from their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from runbook.errors import UsageError
from runbook.stats.decision import Decided
from runbook.stats.launches import meets_target, scaling
from runbook.stats.pairs import non_inferiority, regression
from runbook.stats.plans import FUSED_PLAN
from tests.stats.test_pair_limits import BASE, SPREAD, reach

# non_inferiority


@pytest.mark.parametrize(("side", "decided"), [(1, Decided.KEEP), (-1, Decided.DROP)])
def test_keep_turns_at_the_lower_bound_and_drop_at_the_upper_one(
    side: int, decided: Decided
) -> None:
    for shift, outcome in ((1e-4, decided), (-1e-4, Decided.INCONCLUSIVE)):
        variant = 100 * np.exp(SPREAD + math.log(0.98) + side * (reach(0.05) + shift))
        assert non_inferiority(BASE, variant).outcome is outcome


def test_the_plan_of_the_optimizer_test_stops_early_and_repeats() -> None:
    rng = np.random.default_rng(0)
    base = 100 * np.exp(rng.normal(0, 0.005, 24))
    slow = 0.9 * base * np.exp(rng.normal(0, 0.005, 24))
    short = non_inferiority(base[:8], slow[:8], plan=FUSED_PLAN, final=False)
    assert (short.outcome, short.n) == (Decided.DROP, 8)
    assert non_inferiority(base, slow, plan=FUSED_PLAN) == short
    waiting = non_inferiority(base[:5], slow[:5], plan=FUSED_PLAN, final=False)
    assert (waiting.outcome, waiting.go_on) == (Decided.INCONCLUSIVE, True)


# regression


def test_a_suspicion_that_does_not_hold_passes() -> None:
    head = np.concatenate([[97.0, 97.5, 96.5], np.tile([101.0, 99.0, 100.5], 5)])
    assert regression(np.full(18, 100.0), head).outcome is Decided.PASS


# scaling


def test_the_scaling_bound_is_never_narrower_than_the_ratio_alone_asks_for() -> None:
    """With independent launches ratio and product vary alike; a shared state adds to the product
    only. Expected squared width, relative to the known spread of the ratio, is at least 1."""
    rng = np.random.default_rng(0)
    for shared in (0.0, 0.5, 0.9):
        common = rng.normal(0, 0.02 * shared**0.5, (2000, 5, 1))
        logs = common + rng.normal(0, 0.02 * (1 - shared) ** 0.5, (2000, 5, 2))
        widths = []
        for pair in 100 * np.exp(logs):
            low, high = scaling(pair[:, 0], 2 * pair[:, 1], 2).interval or (math.nan, math.nan)
            widths.append(math.log(high / low) / 2)
        freedom = 4 / ((2 / 3) ** 2 + (1 / 3) ** 2)
        known = 0.02 * math.sqrt(2 * (1 - shared) / 5) * stats.t.ppf(0.99, freedom)
        assert np.mean(np.square(widths)) / known**2 > 0.95, shared


# all of them


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -1.0])
def test_values_that_are_no_throughput(bad: float) -> None:
    good, ill = [1.0, 2.0, 3.0], [1.0, bad, 3.0]
    calls = (
        lambda: non_inferiority(good, ill),
        lambda: regression(ill, good),
        lambda: meets_target(ill, 1.0),
        lambda: meets_target(good, bad),
        lambda: scaling(good, ill, 2),
    )
    for call in calls:
        with pytest.raises(UsageError, match=r"1 of \d value"):
            call()


def test_other_bad_input() -> None:
    with pytest.raises(UsageError, match="paired by round"):
        non_inferiority([1.0, 2.0], [1.0])
    with pytest.raises(UsageError, match="at least 1 value"):
        meets_target([], 1.0)
    with pytest.raises(UsageError, match="at least 2 devices"):
        scaling([1.0], [1.0], 1)
