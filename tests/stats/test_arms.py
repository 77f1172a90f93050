"""The best arm, at once and with interim analyses, from the definition: paired t on log ratios."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd
import pytest
from scipy import stats

from benchmarks.decisions.noise import rates
from runbook.errors import UsageError
from runbook.stats.arms import (
    best_arm_sequential,
    complete_rounds,
    judge_rounds,
    non_inferiority,
    rounds_of,
)
from runbook.stats.decision import FUSED_PLAN, Decided, Decision


def table_of(values: npt.NDArray[np.float64], arms: Sequence[str] | None = None) -> pd.DataFrame:
    """An array [rounds, arms] as a long table with columns arm, block, value."""
    names = arms or [f"arm{index}" for index in range(values.shape[1])]
    rows = [
        (name, block, values[block, index])
        for block in range(values.shape[0])
        for index, name in enumerate(names)
    ]
    return pd.DataFrame(rows, columns=["arm", "block", "value"])


def best_arm(table: pd.DataFrame) -> Decision:
    """The best arm of a long table, at an error of 1 %."""
    return judge_rounds(*rounds_of(table), error=0.01)


def noisy_rounds(speeds: tuple[float, ...], rounds: int, sd: float, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    pace = rng.normal(0, 0.05, (rounds, 1))  # common to the round: pairing must remove it
    return table_of(np.asarray(speeds) * np.exp(pace + rng.normal(0, sd, (rounds, len(speeds)))))


def test_the_decision_turns_exactly_at_the_two_sided_critical_value() -> None:
    """ln ratios are mean +- 1: t = mean * sqrt(n) / sd against the 99.5 % point."""
    spread = np.array([-1.0, 1.0, -1.0, 1.0, -1.0, 1.0]) * 0.01
    edge = stats.t.ppf(0.995, 5) * spread.std(ddof=1) / math.sqrt(6)
    for shift, outcome in ((1.001, Decided.WINNER), (0.999, Decided.TIE)):
        values = np.stack([100 * np.exp(spread + shift * edge), np.full(6, 100.0)], axis=1)
        assert best_arm(table_of(values)).outcome is outcome


# Interim analyses


def test_it_stops_at_the_first_look_that_decides_and_stays_there() -> None:
    table = noisy_rounds((100.0, 120.0), 24, 0.01)
    early = best_arm_sequential(table[table["block"] < 4])
    assert (early.outcome, early.n) == (Decided.WINNER, 4)
    assert best_arm_sequential(table) == early


def test_between_analyses_it_says_go_on_until_time_is_up() -> None:
    """Then what is left of the error is spent."""
    table = noisy_rounds((100.0, 102.0), 5, 0.03)
    waits, ended = (best_arm_sequential(table, final=final) for final in (False, True))
    assert (waits.outcome, waits.go_on, waits.estimate) == (Decided.INCONCLUSIVE, True, None)
    assert "the next interim analysis is after 6" in waits.reason
    assert (ended.outcome, ended.n, ended.go_on) == (Decided.TIE, 5, False)


@pytest.mark.parametrize(("sd", "early"), [(0.005, True), (0.10, False)])
def test_equal_arms_end_early_as_a_tie_if_the_margin_is_wide_enough(sd: float, early: bool) -> None:
    """Noise of 10 % cannot exclude a lead of 2 %."""
    decision = best_arm_sequential(noisy_rounds((100.0, 100.0, 100.0), 24, sd))
    assert (decision.outcome, decision.n < 24) == (Decided.TIE, early)


@pytest.mark.parametrize(
    ("table", "lack"),
    [
        (table_of(np.ones((3, 1))), 0),
        (table_of(np.array([[1.0, 0.0]] * 3)), 3),
        (table_of(np.array([[1.0, math.inf], [1.0, 1.0]])), 1),
        (table_of(np.array([[1.0, math.nan], [-1.0, 1.0]])), 2),
        (table_of(np.ones((3, 2))).iloc[:-1], 1),
    ],
)
def test_what_cannot_be_compared_is_refused(table: pd.DataFrame, lack: int) -> None:
    with pytest.raises(UsageError, match=rf"at least two are needed, .*; {lack} lack"):
        best_arm(table)


# Arms in rounds: the table that is read, and each part of the answer from its definition.

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
    turns = [("ab", 0), ("aa", 1), ("abb", 2), ("ab", 3)]
    rows = [(arm, block) for arms, block in turns for arm in arms]
    table = pd.DataFrame(rows, columns=["arm", "block"]).assign(value=1.0)
    whole, left_out = complete_rounds(table)
    assert (sorted(set(whole["block"])), left_out) == ([0, 3], 2)
    with pytest.raises(ValueError, match="duplicate"):
        rounds_of(table)


def test_the_leader_is_the_arm_with_the_largest_mean_and_its_rival_the_closest_one() -> None:
    """Every number of a TIE from paired t-tests on log ratios."""
    error = 0.001
    decision = judge_rounds(("a", "b", "c"), VALUES, error=error)
    gaps = np.log(VALUES[:, [1]] / VALUES[:, [0, 2]])
    bounds = [stats.t.interval(1 - error, 5, loc=g.mean(), scale=stats.sem(g)) for g in gaps.T]
    rival = int(np.argmin([low for low, _ in bounds]))
    assert (decision.outcome, decision.winner, decision.n) == (Decided.TIE, None, 6)
    assert f"b against {'ac'[rival]}: " in decision.reason
    assert decision.estimate == pytest.approx(math.exp(gaps[:, rival].mean()))
    assert decision.interval == pytest.approx(tuple(map(math.exp, bounds[rival])))


@pytest.mark.parametrize(("share", "futile"), [(0.99, False), (1.01, True)])
def test_it_is_futile_once_no_arm_can_lead_by_two_percent(share: float, futile: bool) -> None:
    """Both bounds at one-sided 95 %: two arms that are equal but for their noise."""
    spread = np.array([-1.0, 1.0, -1.0, 1.0, -1.0, 1.0])
    spread *= math.log1p(0.02) / (share * stats.t.ppf(0.95, 5) * stats.sem(spread))
    values = np.stack([100 * np.exp(spread), np.full(6, 100.0)], axis=1)
    assert judge_rounds(("a", "b"), values, error=0.01).details["futile"] is futile


def test_three_rounds_are_enough_and_two_are_not() -> None:
    values = np.array([[1.0, 2.0], [1.0, 2.001], [1.0, 1.999]])
    assert judge_rounds(("a", "b"), values, error=0.01).winner == "b"
    few = judge_rounds(("a", "b"), values[:2], error=0.01)
    assert (few.outcome, few.n, few.details["futile"]) == (Decided.INCONCLUSIVE, 2, False)


# A machine that changes its pace under the arms decides nothing.


def test_a_difference_beside_a_neighbor_is_not_believed() -> None:
    """It is there in the turns of the second arm; without the steps that is DROP, and WINNER."""
    times = np.exp(np.random.default_rng(0).normal(0, 0.02, (30, 2, 20)))  # rounds, arms, steps
    times[::2, 1] *= 1.4
    first, second = rates(times).T
    assert non_inferiority(first, second, plan=FUSED_PLAN).outcome is Decided.DROP
    seen = non_inferiority(first, second, plan=FUSED_PLAN, steps=times)
    assert seen.outcome is Decided.INCONCLUSIVE
    assert "DROP is not believed" in seen.reason and "changed its pace" in seen.reason
    table = table_of(rates(times)[:24])
    assert best_arm_sequential(table, final=True).outcome is Decided.WINNER
    arm = best_arm_sequential(table, final=True, steps=times)
    assert (arm.outcome, arm.winner) == (Decided.INCONCLUSIVE, None)
