"""A machine that changes its pace under the arms decides nothing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.decisions.noise import rates
from runbook.stats.arms import best_arm_sequential
from runbook.stats.decision import Decided, FloatArray, pace_of
from runbook.stats.pairs import non_inferiority
from runbook.stats.plans import FUSED_PLAN
from tests.stats.tables import table_of

ROUNDS, ARMS, STEPS = 30, 2, 20


def quiet(seed: int = 0, sd: float = 0.02) -> FloatArray:
    """Seconds [rounds, arms, steps] of equal arms, every step on its own."""
    noise = np.random.default_rng(seed).normal(0, sd, (ROUNDS, ARMS, STEPS))
    return np.exp(noise)


def busy_at_times(seed: int = 0) -> FloatArray:
    """The same while something else takes 40 % more in whole rounds, by a coin."""
    busy = np.random.default_rng(seed + 1).random((ROUNDS, 1, 1)) < 0.5
    return quiet(seed) * np.where(busy, 1.4, 1.0)


def beside_the_variant(seed: int = 0) -> FloatArray:
    """By bad luck it is there in the turns of the second arm."""
    times = quiet(seed)
    times[::2, 1] *= 1.4
    return times


def test_a_quiet_machine_has_one_pace() -> None:
    for sd in (0.002, 0.02, 0.06):
        assert not any(pace_of(quiet(seed, sd)).changed for seed in range(100))


@pytest.mark.parametrize("made", [busy_at_times, beside_the_variant])
def test_a_neighbor_that_comes_and_goes_is_seen(made: Callable[[int], FloatArray]) -> None:
    assert all(pace_of(made(seed)).changed for seed in range(100))


def test_what_is_no_neighbor_is_not_taken_for_one() -> None:
    drift = quiet() * np.linspace(0.98, 1.02, ROUNDS)[:, None, None]
    slower = quiet() * np.array([1.0, 1.3])[None, :, None]
    warming = quiet() * (1 + 0.3 * np.exp(-np.arange(STEPS) / 3.0))
    stalls = quiet()
    stalls[::3, 1, 7] *= 9.0
    for times in (drift, slower, warming, stalls):
        assert not pace_of(times).changed


def test_a_difference_beside_a_neighbor_is_not_believed() -> None:
    """Without the steps the same numbers are a DROP, and a WINNER."""
    times = beside_the_variant()
    first, second = rates(times).T
    assert non_inferiority(first, second, plan=FUSED_PLAN).outcome is Decided.DROP
    seen = non_inferiority(first, second, plan=FUSED_PLAN, steps=times)
    assert seen.outcome is Decided.INCONCLUSIVE
    assert "DROP is not believed" in seen.reason and "changed its pace" in seen.reason
    table = table_of(rates(times)[:24])
    assert best_arm_sequential(table, final=True).outcome is Decided.WINNER
    arm = best_arm_sequential(table, final=True, steps=times)
    assert (arm.outcome, arm.winner) == (Decided.INCONCLUSIVE, None)


def test_equal_arms_beside_a_neighbor_stay_a_tie() -> None:
    times = busy_at_times()
    table = table_of(rates(times)[:24])
    assert best_arm_sequential(table, final=True, steps=times).outcome is Decided.TIE


def test_on_a_quiet_machine_the_steps_change_nothing() -> None:
    for slower in (1.0, 1.1):
        times = quiet() * np.array([1.0, slower])[None, :, None]
        first, second = rates(times).T
        plain = non_inferiority(first, second, plan=FUSED_PLAN)
        assert plain.outcome is not Decided.INCONCLUSIVE
        assert non_inferiority(first, second, plan=FUSED_PLAN, steps=times) == plain
