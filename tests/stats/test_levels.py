"""A loss against earlier runs: how often it is shown without one, and with one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import geometric_mean

import numpy as np
import pytest

from benchmarks.decisions.__main__ import simulate
from benchmarks.decisions.catalog import all_cells
from benchmarks.decisions.noise import CALM, NOISY, Noise
from runbook.errors import UsageError
from runbook.stats.decision import Decided
from runbook.stats.launches import LEVEL_RUNS, allowance_of, below_level, loss_shown

ALLOWED = 0.05
LOSSES = {cell.name: cell for cell in all_cells() if cell.question.startswith("a loss against")}


def share(against: str, machine: str, lost: str) -> float:
    """How often a loss is shown in 400 simulated runs."""
    return simulate(LOSSES[f"a loss against {against} | {machine} | {lost} lost"], 400).rate("FAIL")


def nights(noise: Noise, random: np.random.Generator) -> Iterator[list[float]]:
    """The launches of one night after the other, which share half of their variance."""
    part = noise.launch_sd * math.sqrt(0.5)
    while True:
        middle = math.log(1e5) + random.normal(0, part)
        yield [math.exp(middle + random.normal(0, part)) for _ in range(3)]


def stopped_at(noise: Noise, random: np.random.Generator, *, level: bool = True) -> float:
    """The loss at which a machine that loses 1 % a night is no longer accepted.

    level: it is held against the best level, too, and not against the last run alone.
    """
    source = nights(noise, random)
    accepted = [next(source) for _ in range(10)]
    for night in range(1, 200):
        left = 0.99**night
        now = [rate * left for rate in next(source)]
        history = [geometric_mean(one) for one in accepted]
        decisions = [loss_shown(accepted[-1], now, allowance=ALLOWED)]
        if level:
            decisions.append(below_level(history, geometric_mean(now), allowance=ALLOWED))
        if any(one.outcome is Decided.FAIL for one in decisions):
            return 1 - left
        accepted.append(now)
    return 1.0


def test_a_large_loss_is_shown_by_the_first_run_that_has_it() -> None:
    assert share("the last run", "calm", "15%") >= 0.95
    assert share("the last run", "noisy", "30%") >= 0.98
    assert share("the best level of 30 runs", "noisy", "15%") >= 0.90


@pytest.mark.parametrize(("machine", "most"), [(CALM, 0.12), (NOISY, 0.17)])
def test_one_percent_a_night_does_not_pass_for_long(machine: Noise, most: float) -> None:
    random = np.random.default_rng(2)
    losses = [stopped_at(machine, random) for _ in range(100)]
    assert float(np.quantile(losses, 0.95)) <= most
    alone = [stopped_at(CALM, random, level=False) for _ in range(40)]
    assert float(np.median(alone)) > 0.3, "the last run alone would let it pass: see the level"


def test_shared_cores_may_differ_by_half_and_a_device_that_is_unknown_by_as_much() -> None:
    assert [allowance_of(device) for device in ("cuda", "cpu", "xpu")] == [0.05, 0.5, 0.5]


def test_one_lucky_run_is_no_level() -> None:
    source = nights(CALM, np.random.default_rng(3))
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
