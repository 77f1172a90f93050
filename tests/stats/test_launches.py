"""Published false-decision rates at a smaller size, and the plans that they are published for.

400 runs per cell from a fixed seed; all cells in the long tier. A rate passes if its count is one
that the published limit allows with probability 0.9999.
"""

from __future__ import annotations

import inspect
import math
import sys
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from scipy import stats
from scipy.stats import binom

from benchmarks.decisions.__main__ import main, plan_table, simulate
from benchmarks.decisions.catalog import LAUNCHED_PAIRS, PAIR_STEPS, Cell, Claim, all_cells
from nsa.tests import test_performance_guards
from runbook.config.load import load_profile
from runbook.stats import decision as plans
from runbook.stats.arms import best_arm_sequential, non_inferiority, t_quantile
from runbook.stats.decision import Decided
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
    assert simulated == {id(plan) for plan in plans.PLANS.values()}
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
    assert followed and all(one is plans.PLANS[plan] for one in followed)


def test_the_shipped_race_of_v2_is_the_one_that_is_simulated() -> None:
    race = plans.PLANS["v2 faster"]
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
