"""Published false-decision rates at a smaller size, and the plans that they are published for.

400 runs per cell from a fixed seed; all cells in the long tier. A rate passes if its count is one
that the published limit allows with probability 0.9999.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pytest
from scipy import stats
from scipy.stats import binom

from benchmarks.decisions.__main__ import main, plan_table, simulate
from benchmarks.decisions.catalog import LAUNCHED_PAIRS, PAIR_STEPS, Cell, Claim, all_cells
from benchmarks.decisions.cells import PLANS
from benchmarks.decisions.noise import rates
from nsa.tests import test_performance_guards
from runbook import stats as plans
from runbook.config.load import load_profile
from runbook.errors import UsageError
from runbook.stats import FUSED_PLAN, Decided, Decision
from runbook.stats.arms import (
    best_arm_sequential,
    complete_rounds,
    judge_rounds,
    non_inferiority,
    rounds_of,
    t_quantile,
)
from runbook.stats.launches import LEVEL_RUNS, below_level, loss_shown, scaling
from tests.factory.tables import table
from tests.phases import builder
from tests.tiers import by_tier

RUNS = 400
CELLS = {cell.name: cell for cell in all_cells()}
# Where each answer turns is told in the other modules: of a question the fast tier has one cell.
FAST = {cell.question: name for name, cell in CELLS.items()}.values()


def within(count: int, runs: int, claim: Claim) -> bool:
    """Whether so many answers can be explained by chance if the claim is true."""
    if claim.at_most:
        return count <= binom.ppf(0.9999, runs, claim.limit)
    return count >= binom.ppf(0.0001, runs, claim.limit)


@pytest.mark.parametrize("name", by_tier(CELLS, fast=set(FAST).__contains__))
def test_published_rate(name: str) -> None:
    cell: Cell = CELLS[name]
    result = simulate(cell, RUNS)
    for claim in cell.claims:
        if claim.when(result):
            assert within(result.answers[claim.answer], RUNS, claim), (claim, result)


def test_a_claim_that_is_missed_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    impossible = Claim("TIE", 0.0)
    cell = CELLS["best arm, blocks | calm | all equal"]
    wrong = Cell(cell.question, cell.noise, cell.truth, cell.run, (impossible,))
    monkeypatch.setattr("benchmarks.decisions.__main__.all_cells", lambda: [wrong])
    monkeypatch.setattr("sys.argv", ["decisions.py", "--runs", "20"])
    assert main() == 1


# A loss against earlier runs.

ALLOWED = 0.05


def test_the_bounds_of_a_loss_against_a_level_by_hand() -> None:
    """The best mean of five in a row; noise from successive differences, on 2/3 as many degrees."""
    runs = [5.0, 1.00, 1.10, 1.02, 1.08, 1.04, *[0.9, 0.95] * 13]  # the first is over 30 runs ago
    logs = np.log(runs[1:31])
    noise = math.sqrt(np.square(np.diff(logs)).sum() / 29 / 2)
    half = stats.t.isf(0.01, 29 * 2 / 3) * noise * math.sqrt(6 / 5)
    middle = math.log(0.9) - logs[:5].mean()
    found = below_level(runs[:31], 0.9, allowance=ALLOWED)
    assert found.interval == pytest.approx((math.exp(middle - half), math.exp(middle + half)))
    assert (found.outcome, found.n) == (Decided.INCONCLUSIVE, 30)


def test_a_few_launches_show_a_loss_beyond_all_noise_and_no_other() -> None:
    assert loss_shown([90.0], [30.0], allowance=ALLOWED).outcome is Decided.FAIL
    near = loss_shown([90.0], [80.0], allowance=ALLOWED)
    assert near.outcome is Decided.INCONCLUSIVE
    assert loss_shown([90.0], [95.0], allowance=ALLOWED).outcome is Decided.PASS
    # Three that agree by luck: without a least spread the bound would be the estimate itself.
    alike = loss_shown([100.0, 100.0, 100.0], [94.9, 94.9, 94.9], allowance=ALLOWED)
    assert alike.outcome is Decided.INCONCLUSIVE


def test_fewer_than_five_runs_are_no_level() -> None:
    found = below_level([1e5] * (LEVEL_RUNS - 1), 5e4, allowance=ALLOWED)
    assert (found.outcome, found.estimate) == (Decided.INCONCLUSIVE, None)


# The plan whose rates are published is the object that the phases follow.


def test_every_plan_and_nothing_else_is_simulated_and_the_page_has_all_of_it() -> None:
    simulated = {id(cell.plan) for cell in all_cells() if cell.plan is not None}
    assert simulated == {id(plan) for plan in PLANS.values()}
    page = (Path(__file__).parents[2] / "benchmarks/results/decisions.md").read_text("utf-8")
    assert plan_table() in page


BY_NAME = {one.__name__: one for one in (best_arm_sequential, non_inferiority, scaling)}


@table(__file__, "published")
def test_a_phase_follows_the_published_plan(
    monkeypatch: pytest.MonkeyPatch, row: str, by: str, plan: str, changes: dict[str, Any]
) -> None:
    """The power of five pairs was published, the phase decided on three without a plan."""
    function, (phase, _, what) = BY_NAME[by], row.partition(".")
    default = inspect.signature(function).parameters["plan"].default
    followed = []

    def recorded(*values: Any, **options: Any) -> Any:
        followed.append(options.get("plan", default))
        return function(*values, **options)

    users = [module for name, module in sys.modules.items() if name.startswith("phases.")]
    for module in users:
        for name in [name for name, value in vars(module).items() if value is function]:
            monkeypatch.setattr(module, name, recorded)
    where = builder.context(**changes)
    before = {"baseline": builder.evidence("baseline", where)}
    builder.row(phase, what, builder.evidence(phase, where, earlier=before), where)
    assert followed and all(one is PLANS[plan] for one in followed)


def test_the_shipped_race_of_v2_is_the_one_that_is_simulated() -> None:
    race = PLANS["v2 faster"]
    assert isinstance(race, plans.FixedPlan)
    assert race.units == test_performance_guards.BLOCKS
    quantile = t_quantile(race.error, race.units - 1)
    assert quantile == pytest.approx(test_performance_guards.T_99, abs=1e-3)


@pytest.mark.parametrize("name", ["a100x2_pcie4", "a100x2_pcie3"])
def test_the_published_rates_are_those_of_the_pairs_that_are_launched(name: str) -> None:
    phases = load_profile(name).phases
    assert phases["single_gpu"].launches == LAUNCHED_PAIRS
    assert phases["baseline"].launches == LAUNCHED_PAIRS
    assert phases["bucket_sweep"].rounds == plans.BUCKET_PLAN.max_rounds
    assert phases["bucket_sweep"].launches == plans.BUCKET_LAUNCHES_PLAN.max_rounds
    assert phases["fused_adamw"].rounds == plans.FUSED_PLAN.max_rounds
    assert phases["fused_adamw"].launches == plans.FUSED_LAUNCHES_PLAN.max_rounds
    assert phases["single_gpu"].launches == plans.SCALING_PLAN.max_rounds
    assert phases["single_gpu"].steps == phases["baseline"].steps == PAIR_STEPS
    assert load_profile("h200x1").phases["baseline"].launches == plans.TARGET_PLAN.units


# The order of the arms


@pytest.mark.parametrize("arms", [("a", "b"), ("a", "b", "c"), tuple("abcdef")])
@pytest.mark.parametrize("rounds", [1, 2, 6, 7, 24])
def test_a_linear_drift_favors_no_arm(arms: tuple[str, ...], rounds: int) -> None:
    """In random order an arm is early or late by chance; in a fixed one always."""
    for seed in range(20):
        orders = plans.balanced_rounds(arms, rounds, Random(seed))
        assert len(orders) == rounds
        assert all(sorted(order) == sorted(arms) for order in orders)
        turns = [arm for order in orders[: rounds - rounds % 2] for arm in order]
        places = {sum(at for at, arm in enumerate(turns) if arm == one) for one in arms}
        assert len(places) == 1


def test_which_arm_goes_first_is_drawn_anew_unless_told() -> None:
    firsts = {plans.balanced_rounds("ab", 2, Random(seed))[0] for seed in range(20)}
    assert firsts == {("a", "b"), ("b", "a")}
    told = {plans.balanced_rounds("ab", 4, Random(seed), ordered_first=True) for seed in range(20)}
    assert {orders[:2] for orders in told} == {(("a", "b"), ("b", "a"))} and len(told) == 2


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


def in_looks(table: pd.DataFrame, **how: Any) -> Decision:
    """The best arm of a long table, by interim analyses."""
    return best_arm_sequential(*rounds_of(table), plan=plans.BUCKET_PLAN, **how)


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
    early = in_looks(table[table["block"] < 4])
    assert (early.outcome, early.n) == (Decided.WINNER, 4)
    assert in_looks(table) == early


def test_between_analyses_it_says_go_on_until_time_is_up() -> None:
    """Then what is left of the error is spent."""
    table = noisy_rounds((100.0, 102.0), 5, 0.03)
    waits, ended = (in_looks(table, final=final) for final in (False, True))
    assert (waits.outcome, waits.go_on, waits.estimate) == (Decided.INCONCLUSIVE, True, None)
    assert "the next interim analysis is after 6" in waits.reason
    assert (ended.outcome, ended.n, ended.go_on) == (Decided.TIE, 5, False)


@pytest.mark.parametrize(("sd", "early"), [(0.005, True), (0.10, False)])
def test_equal_arms_end_early_as_a_tie_if_the_margin_is_wide_enough(sd: float, early: bool) -> None:
    """Noise of 10 % cannot exclude a lead of 2 %."""
    decision = in_looks(noisy_rounds((100.0, 100.0, 100.0), 24, sd))
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
    assert in_looks(table, final=True).outcome is Decided.WINNER
    arm = in_looks(table, final=True, steps=times)
    assert (arm.outcome, arm.winner) == (Decided.INCONCLUSIVE, None)
