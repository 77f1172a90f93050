"""The plan whose rates are published is the object that the phases follow."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from benchmarks.decisions import __main__ as decisions
from benchmarks.decisions import catalog as decision_cells
from nsa.tests import test_performance_guards
from runbook.config.load import load_profile
from runbook.stats import plans
from runbook.stats.arms import best_arm_sequential
from runbook.stats.decision import Decided
from runbook.stats.launches import scaling
from runbook.stats.pairs import non_inferiority, regression, t_quantile
from tests.phases import builder


@pytest.mark.parametrize("question", plans.PLANS)
def test_every_plan_is_simulated(question: str) -> None:
    simulated = [cell for cell in decision_cells.all_cells() if cell.plan is plans.PLANS[question]]
    assert simulated


def test_nothing_else_is_simulated_and_the_page_has_all_of_it() -> None:
    published = {id(plan) for plan in plans.PLANS.values()}
    assert len(published) == len(plans.PLANS)
    for cell in decision_cells.all_cells():
        assert cell.plan is None or id(cell.plan) in published
    for question in ("best arm", "fused", "throughput", "scaling", "nightly", "v2", "A/A"):
        cells = [cell for cell in decision_cells.all_cells() if cell.question.startswith(question)]
        assert cells and all(cell.plan is not None for cell in cells)
    page = (Path(__file__).parents[2] / "benchmarks/results/decisions.md").read_text("utf-8")
    assert decisions.plan_table() in page


@pytest.mark.parametrize(
    ("phase", "check", "function", "plan", "changes"),
    [
        ("bucket_sweep", "best", best_arm_sequential, "best arm, blocks", {}),
        (
            "bucket_sweep", "best", best_arm_sequential, "best arm, launches",
            {"protocol": "launches"},
        ),
        ("bucket_sweep", "best", best_arm_sequential, "equal arms (A/A)", {"aa": True}),
        ("fused_adamw", "keep", non_inferiority, "fused AdamW, blocks", {}),
        (
            "fused_adamw", "keep", non_inferiority, "fused AdamW, launches",
            {"protocol": "launches"},
        ),
        ("fused_adamw", "keep", best_arm_sequential, "equal arms (A/A)", {"aa": True}),
        ("single_gpu", "scaling", scaling, "scaling", {}),
    ],
)  # fmt: skip
def test_a_phase_follows_the_published_plan(
    monkeypatch: pytest.MonkeyPatch,
    phase: str,
    check: str,
    function: Callable[..., Any],
    plan: str,
    changes: dict[str, Any],
) -> None:
    """The power of five pairs was published, the phase decided on three without a plan."""
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
    builder.row(phase, check, builder.evidence(phase, where, earlier=before), where)
    assert followed and all(one is plans.PLANS[plan] for one in followed)


def test_the_command_that_compares_nights_follows_the_published_plan() -> None:
    default = inspect.signature(regression).parameters["plan"].default
    assert default is plans.PLANS["nightly regression"]


def test_the_shipped_race_of_v2_is_the_one_that_is_simulated() -> None:
    race = plans.PLANS["v2 faster"]
    assert isinstance(race, plans.FixedPlan)
    assert race.units == test_performance_guards.BLOCKS
    quantile = t_quantile(race.error, race.units - 1)
    assert quantile == pytest.approx(test_performance_guards.T_99, abs=1e-3)


@pytest.mark.parametrize("name", ["a100x2_pcie4", "a100x2_pcie3"])
def test_the_published_rates_are_those_of_the_pairs_that_are_launched(name: str) -> None:
    phases = load_profile(name).phases
    assert phases["single_gpu"].launches == decision_cells.LAUNCHED_PAIRS
    assert phases["baseline"].launches == decision_cells.LAUNCHED_PAIRS
    assert phases["bucket_sweep"].rounds == plans.BUCKET_PLAN.max_rounds
    assert phases["bucket_sweep"].launches == plans.BUCKET_LAUNCHES_PLAN.max_rounds
    assert phases["fused_adamw"].rounds == plans.FUSED_PLAN.max_rounds
    assert phases["fused_adamw"].launches == plans.FUSED_LAUNCHES_PLAN.max_rounds
    assert phases["single_gpu"].launches == plans.SCALING_PLAN.max_rounds
    assert phases["single_gpu"].steps == phases["baseline"].steps == decision_cells.PAIR_STEPS
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


def test_a_random_order_alone_does_favor_one() -> None:
    """The check above must be able to fail."""
    turns = [arm for seed in range(6) for arm in Random(seed).sample("ab", 2)]
    places = {sum(at for at, arm in enumerate(turns) if arm == one) for one in "ab"}
    assert len(places) == 2


def test_which_arm_goes_first_is_drawn_anew_unless_told() -> None:
    firsts = {plans.balanced_rounds("ab", 2, Random(seed))[0] for seed in range(20)}
    assert firsts == {("a", "b"), ("b", "a")}
    told = {plans.balanced_rounds("ab", 4, Random(seed), ordered_first=True) for seed in range(20)}
    assert {orders[:2] for orders in told} == {(("a", "b"), ("b", "a"))} and len(told) == 2


# What a plan that keeps at its end only does


def test_nothing_is_kept_before_the_end() -> None:
    """A variant that stalls in a tenth of its rounds was kept after 8 rounds without a stall."""
    base = 100 * np.exp(np.random.default_rng(0).normal(0, 0.003, plans.FUSED_PLAN.max_rounds))
    for rounds in (6, 8, 24, 29):
        early = non_inferiority(base[:rounds], base[:rounds], plan=plans.FUSED_PLAN)
        assert early.outcome is Decided.INCONCLUSIVE and "stall now and then" in early.reason
    assert non_inferiority(base, base, plan=plans.FUSED_PLAN).outcome is Decided.KEEP
    early = replace(plans.FUSED_PLAN, keep_at_end=False)
    assert non_inferiority(base[:8], base[:8], plan=early).outcome is Decided.KEEP
