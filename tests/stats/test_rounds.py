"""Arms in rounds: the table that is read, and each part of the answer from its definition."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from runbook.errors import UsageError
from runbook.stats.arms import (
    best_arm,
    complete_rounds,
    judge_rounds,
    judge_rounds_so_far,
    rounds_of,
)
from runbook.stats.decision import Decided
from runbook.stats.plans import BUCKET_PLAN
from tests.stats.tables import table_of

NOISE = np.random.default_rng(11).normal(0, 0.01, (6, 3))
VALUES = 100 * np.exp(np.array([0.0, 0.03, 0.01]) + NOISE)


def test_rounds_with_names_stay_in_order_of_appearance() -> None:
    rows = [("x", "late", 1.0), ("a", "late", 2.0), ("a", "early", 3.0), ("x", "early", 4.0)]
    table = pd.DataFrame(rows, columns=["arm", "block", "value"])
    arms, values = rounds_of(table)
    assert (arms, values.tolist()) == (["x", "a"], [[1.0, 2.0], [4.0, 3.0]])
    numbered = table.assign(block=table["block"].map({"late": 10, "early": 9}))
    assert rounds_of(numbered)[1].tolist() == [[4.0, 3.0], [1.0, 2.0]]


def test_a_round_in_which_an_arm_ran_twice_is_not_whole() -> None:
    rows = [
        ("a", 0),
        ("b", 0),
        ("a", 1),
        ("a", 1),
        ("a", 2),
        ("b", 2),
        ("b", 2),
        ("a", 3),
        ("b", 3),
    ]
    table = pd.DataFrame(rows, columns=["arm", "block"]).assign(value=1.0)
    whole, left_out = complete_rounds(table)
    assert (sorted(set(whole["block"])), left_out) == ([0, 3], 2)
    with pytest.raises(UsageError, match=r"missing column\(s\) arm, value; got block"):
        complete_rounds(table[["block"]])
    with pytest.raises(UsageError, match="no rows"):
        complete_rounds(table[:0])


def test_each_empty_cell_and_the_first_bad_value_are_named() -> None:
    table = table_of(np.ones((3, 2))).astype({"arm": object, "block": object, "value": object})
    table.loc[0, "arm"] = table.loc[1, "block"] = table.loc[2, "block"] = None
    table.loc[3, "value"], table.loc[4, "value"] = 0.0, "fast"
    with pytest.raises(UsageError) as caught:
        best_arm(table)
    message = str(caught.value)
    for text in (
        "column arm: 1 empty cell(s)",
        "column block: 2 empty cell(s)",
        "column value: 2 value(s) not finite and above 0, first 0.0 (arm arm1, block 1)",
    ):
        assert text in message


def test_the_leader_is_the_arm_with_the_largest_mean_and_its_rival_the_closest_one() -> None:
    """Every number of a TIE from paired t-tests on log ratios."""
    error = 0.001
    decision = judge_rounds(("a", "b", "c"), VALUES, error=error)
    gaps = np.log(VALUES[:, [1]] / VALUES[:, [0, 2]])
    bounds = [stats.t.interval(1 - error, 5, loc=g.mean(), scale=stats.sem(g)) for g in gaps.T]
    rival = int(np.argmin([low for low, _ in bounds]))
    assert (decision.outcome, decision.winner, decision.n) == (Decided.TIE, None, 6)
    assert decision.details["leader"] == "b"
    assert decision.details["rival"] == ("a", "c")[rival]
    assert decision.details["standard_error"] == pytest.approx(stats.sem(gaps[:, rival]))
    assert decision.estimate == pytest.approx(math.exp(gaps[:, rival].mean()))
    assert decision.interval == pytest.approx(tuple(map(math.exp, bounds[rival])))
    typical = dict(zip("abc", stats.gmean(VALUES, axis=0), strict=True))
    assert decision.details["typical"] == pytest.approx(typical)
    ratio, (low, high) = math.exp(gaps[:, rival].mean()), map(math.exp, bounds[rival])
    gap = f"{ratio - 1:+.1%} ({low - 1:+.1%} to {high - 1:+.1%})"
    assert decision.reason == (
        "no arm is shown to beat every other one;"
        f" b against {decision.details['rival']}: {gap}; keep the configured value"
    )


@pytest.mark.parametrize(("share", "futile"), [(0.99, False), (1.01, True)])
def test_it_is_futile_once_no_arm_can_lead_by_the_effect(share: float, futile: bool) -> None:
    """Both bounds at one-sided 95 %: two arms that are equal but for their noise."""
    spread = np.array([-1.0, 1.0, -1.0, 1.0, -1.0, 1.0]) * 0.01
    reach = stats.t.ppf(0.95, 5) * stats.sem(spread)
    values = np.stack([100 * np.exp(spread), np.full(6, 100.0)], axis=1)
    decision = judge_rounds(("a", "b"), values, error=0.01, min_effect=math.expm1(share * reach))
    assert decision.details["futile"] is futile
    assert ("no arm leads all others by" in decision.reason) is futile


def test_three_rounds_are_enough_and_two_are_not() -> None:
    values = np.array([[1.0, 2.0], [1.0, 2.001], [1.0, 1.999]])
    assert judge_rounds(("a", "b"), values, error=0.01).winner == "b"
    few = judge_rounds(("a", "b"), values[:2], error=0.01)
    assert few.reason == "2 complete round(s); at least 3 are needed"
    assert (few.outcome, few.n, few.details["futile"]) == (Decided.INCONCLUSIVE, 2, False)
    assert "a beats every other arm" in judge_rounds(("b", "a"), values, error=0.01).reason


def test_more_rounds_may_come_unless_told() -> None:
    waiting = judge_rounds_so_far(("a", "b", "c"), VALUES[:5], plan=BUCKET_PLAN)
    assert waiting.go_on and waiting.details["next_analysis"] == 6


def test_only_a_pair_needs_two_arms() -> None:
    with pytest.raises(UsageError, match=r"arms: \['arm0'\]; at least two"):
        best_arm(table_of(np.ones((3, 1))))
    assert best_arm(table_of(np.ones((3, 2)))).outcome is Decided.TIE
