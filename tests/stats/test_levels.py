"""A loss against earlier runs: how often it is shown without one, and with one."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import geometric_mean

import numpy as np
import pytest

from benchmarks.accepted_runs import (
    ALLOWED,
    MACHINES,
    against_last,
    against_level,
    nights,
    stopped_at,
)
from runbook.errors import UsageError
from runbook.stats.decision import Decided
from runbook.stats.levels import LEVEL_RUNS, allowance_of, below_level, loss_shown

RUNS = 400
# Declared 1 %, and two standard errors of 400 simulated runs.
MOST_WRONG = 0.01 + 2 * math.sqrt(0.01 * 0.99 / RUNS)


def share(
    decide: Callable[[float, float, np.random.Generator], bool], machine: str, loss: float
) -> float:
    """How often a loss is shown in simulated runs of the benchmark."""
    random = np.random.default_rng(1)
    return sum(decide(MACHINES[machine], loss, random) for _ in range(RUNS)) / RUNS


@pytest.mark.parametrize("machine", MACHINES)
def test_equal_runs_show_no_loss(machine: str) -> None:
    for decide in (against_last, against_level(30), against_level(LEVEL_RUNS)):
        assert share(decide, machine, 0.0) <= MOST_WRONG


def test_a_large_loss_is_shown_by_the_first_run_that_has_it() -> None:
    assert share(against_last, "calm", 0.15) >= 0.95
    assert share(against_last, "noisy", 0.30) >= 0.98
    assert share(against_level(30), "noisy", 0.15) >= 0.90
    assert share(against_last, "v4-like", 2 / 3) == 1.0


@pytest.mark.parametrize(("machine", "most"), [("calm", 0.12), ("noisy", 0.17)])
def test_one_percent_a_night_does_not_pass_for_long(machine: str, most: float) -> None:
    random = np.random.default_rng(2)
    losses = [stopped_at(MACHINES[machine], 0.01, random) for _ in range(100)]
    assert float(np.quantile(losses, 0.95)) <= most
    alone = [stopped_at(MACHINES["calm"], 0.01, random, level=False) for _ in range(40)]
    assert float(np.median(alone)) > 0.3, "the last run alone would let it pass: see the level"


def test_shared_cores_may_differ_by_half_and_a_device_that_is_unknown_by_as_much() -> None:
    assert [allowance_of(device) for device in ("cuda", "cpu", "xpu")] == [0.05, 0.5, 0.5]


def test_one_lucky_run_is_no_level() -> None:
    source = nights(MACHINES["calm"], np.random.default_rng(3))
    calm = [geometric_mean(next(source)) for _ in range(12)]
    lucky = [*calm[:6], 1.25e5, *calm[6:]]
    assert below_level(lucky, calm[0], allowance=ALLOWED).outcome is not Decided.FAIL


def test_a_few_launches_show_a_loss_beyond_all_noise_and_no_other() -> None:
    assert loss_shown([90.0], [30.0], allowance=ALLOWED).outcome is Decided.FAIL
    near = loss_shown([90.0], [80.0], allowance=ALLOWED)
    assert near.outcome is Decided.INCONCLUSIVE
    assert loss_shown([90.0], [95.0], allowance=ALLOWED).outcome is Decided.PASS


def test_three_launches_that_agree_by_luck_show_nothing_of_their_own() -> None:
    # Without a least spread the bound would be the estimate itself.
    found = loss_shown([100.0, 100.0, 100.0], [94.9, 94.9, 94.9], allowance=ALLOWED)
    assert found.outcome is Decided.INCONCLUSIVE


def test_fewer_than_five_runs_are_no_level() -> None:
    found = below_level([1e5] * (LEVEL_RUNS - 1), 5e4, allowance=ALLOWED)
    assert (found.outcome, found.estimate) == (Decided.INCONCLUSIVE, None)


@pytest.mark.parametrize("bad", [[], [0.0], [math.nan], [-1.0, 2.0]])
def test_rates_that_cannot_be_are_refused(bad: list[float]) -> None:
    with pytest.raises(UsageError):
        loss_shown(bad, [1.0], allowance=ALLOWED)
    with pytest.raises(UsageError):
        below_level([1.0] * 5, 0.0, allowance=ALLOWED)
