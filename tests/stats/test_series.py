"""steady, warm-up and memory_plateau: decisions about one run's series."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from runbook.errors import UsageError
from runbook.stats.decision import Decided
from runbook.stats.memory import memory_plateau
from runbook.stats.steady import stall_share, steady
from runbook.stats.throughput import warmup_cut

RNG = np.random.default_rng(0)
# The first step allocates and compiles: it is always cut, 24 batches of 50 are left.
CALM = np.concatenate([[2.0], 0.5 * np.exp(RNG.normal(0, 0.02, 1200))])
STEPS = np.arange(1200)
LEVEL = 8000 + RNG.normal(0, 5, 1200)


# steady


def test_a_level_run_is_steady() -> None:
    decision = steady(CALM)
    assert (decision.outcome, decision.n) == (Decided.PASS, 24)


def test_the_slope_is_that_of_least_squares_over_batches() -> None:
    """Alternating residuals have no positive autocorrelation, so the plain interval holds."""
    times = np.repeat(np.exp(0.001 * np.arange(24) + 0.002 * (-1.0) ** np.arange(24)), 50)
    decision = steady(np.concatenate([[9.0], times]))
    fit = stats.linregress(np.arange(24), np.log(times[::50]))
    half = stats.t.ppf(0.95, 22) * fit.stderr * 24
    expected = (math.expm1(fit.slope * 24 - half), math.expm1(fit.slope * 24 + half))
    assert decision.interval == pytest.approx(expected, rel=1e-6)


def test_dependent_batches_widen_the_interval() -> None:
    calm = steady(np.repeat(np.exp(0.004 * (-1.0) ** np.arange(24)), 50))
    slow = steady(np.repeat(np.exp(0.004 * np.sign(np.sin(np.arange(24) / 2))), 50))
    assert calm.interval and slow.interval
    assert slow.interval[1] - slow.interval[0] > 1.5 * (calm.interval[1] - calm.interval[0])


@pytest.mark.parametrize("drift", [0.08, -0.08])
def test_a_drift_fails(drift: float) -> None:
    decision = steady(CALM * np.exp(np.linspace(0, drift, 1201)))
    assert decision.outcome is Decided.FAIL
    assert "beyond +-3%" in decision.reason


def test_a_step_in_pace_is_found_where_it_is() -> None:
    """Two shifts that cancel in the slope."""
    times = CALM.copy()
    times[501:701] *= 1.06
    decision = steady(times)
    assert decision.outcome is Decided.FAIL or decision.outcome is Decided.INCONCLUSIVE
    times = CALM.copy()
    times[601:] *= 1.06
    decision = steady(times)
    assert decision.outcome is Decided.FAIL
    assert "shift of +6" in decision.reason
    assert abs(int(decision.details["change_step"]) - 600) <= 50  # type: ignore[arg-type]


def test_a_small_shift_is_no_fault() -> None:
    times = CALM.copy()
    times[601:] *= 1.01
    decision = steady(times)
    assert float(decision.details["change_p"]) < 0.01  # type: ignore[arg-type]
    assert decision.outcome is not Decided.FAIL


def test_pauses_are_stall_and_not_drift() -> None:
    times = CALM.copy()
    times[[300, 500]] *= 3
    assert steady(times).outcome is Decided.PASS
    times[900:920] *= 3
    decision = steady(times)
    assert decision.outcome is Decided.FAIL
    assert "stall" in decision.reason
    kept = times[1:]
    slow = kept > 2 * np.median(kept)
    assert decision.details["stall"] == pytest.approx(kept[slow].sum() / kept.sum())


@pytest.mark.parametrize(("every", "factor"), [(25, 1.9), (10, 1.3), (50, 1.7), (5, 1.25)])
def test_stalls_below_twice_the_median_are_found_by_their_share(every: int, factor: float) -> None:
    """A 1.9x step every 25th passed in 100 of 100 runs: no single one is a pause."""
    times = CALM.copy()
    times[every::every] *= factor
    assert not (times[1:] > 2 * np.median(times)).any()
    decision = steady(times)
    assert decision.outcome is Decided.FAIL
    assert f"a slow step every {every} steps" in decision.reason
    assert decision.details["stall_period"] == every
    lost = (factor - 1) / every / (1 + (factor - 1) / every)
    assert decision.details["stall"] == pytest.approx(lost, rel=0.1)


def test_a_stall_share_by_hand() -> None:
    """Of 100 steps 97 take 1 s, two take 1.5 s, one takes 3 s: (2 x 0.5 + 3) / 103."""
    times = np.ones(100)
    times[[20, 50]], times[80] = 1.5, 3.0
    assert stall_share(times) == pytest.approx(4.0 / 103.0)
    assert stall_share(np.ones(100)) == 0.0


@settings(max_examples=50)
@given(st.integers(0, 1000), st.floats(1.0, 10.0), st.integers(2, 200))
def test_it_is_never_milder_than_the_rule_of_pauses_alone(
    seed: int, factor: float, every: int
) -> None:
    times = np.exp(np.random.default_rng(seed).normal(0, 0.1, 600))
    times[every::every] *= factor
    pauses = times[times > 2 * np.median(times)]
    assert stall_share(times) >= pauses.sum() / times.sum() - 1e-12


def test_noise_alone_is_no_stall() -> None:
    """Under one false alarm in a hundred, whatever the spread; here none."""
    for sd in (0.001, 0.01, 0.035, 0.06):
        noise = np.random.default_rng(3).normal(0, sd, (200, 1200))
        assert max(stall_share(row) for row in np.exp(noise)) < 0.01


def test_slow_steps_at_random_have_no_period() -> None:
    times = CALM.copy()
    at = np.random.default_rng(5).choice(np.arange(1, 1201), 60, replace=False)
    times[at] *= 1.5
    decision = steady(times)
    assert decision.outcome is Decided.FAIL
    assert decision.details["stall_period"] is None and "every" not in decision.reason


def test_a_short_run_is_inconclusive_and_a_noisy_one_too() -> None:
    assert steady(CALM[:79]).outcome is Decided.INCONCLUSIVE
    assert steady(CALM[:90]).n == 8
    wild = 0.5 * np.exp(np.random.default_rng(1).normal(0, 0.2, 400))
    assert steady(wild).outcome is Decided.INCONCLUSIVE


@settings(max_examples=30)
@given(st.floats(1e-3, 1e3))
def test_the_unit_of_time_does_not_matter(factor: float) -> None:
    one, other = steady(CALM), steady(CALM * factor)
    assert one.estimate == pytest.approx(other.estimate, abs=1e-9)
    assert one.outcome is other.outcome


def test_warm_up_is_cut_and_only_that() -> None:
    times = CALM.copy()
    times[:30] *= np.linspace(4, 1.3, 30)
    assert 25 <= warmup_cut(times) <= 32
    assert steady(times).outcome is Decided.PASS
    assert warmup_cut(CALM) == 1


def test_warm_up_takes_at_most_a_quarter() -> None:
    """A run that gets faster throughout has a trend, not a warm-up."""
    times = CALM * np.exp(np.linspace(3.0, 0, 1201))
    assert warmup_cut(times) == 300
    assert steady(times).outcome is Decided.FAIL


# memory


def test_a_clean_allocator_has_its_plateau() -> None:
    decision = memory_plateau(STEPS, LEVEL, 50_000, 16_000)
    assert decision.outcome is Decided.PASS
    assert decision.estimate == pytest.approx(8000, abs=300)


def test_the_slope_is_theil_sen() -> None:
    mib = 8000 + 0.01 * STEPS
    decision = memory_plateau(STEPS, mib, 50_000, 16_000)
    theil = stats.theilslopes(mib[600:], STEPS[600:])
    assert decision.details["slope_mib_per_step"] == pytest.approx(theil.slope, rel=1e-6)
    assert decision.estimate == pytest.approx(8000 + 0.01 * 50_000, rel=1e-3)


def test_a_leak_fails_even_behind_an_early_spike() -> None:
    leak = LEVEL + 0.2 * STEPS
    assert memory_plateau(STEPS, leak, 50_000, 64_000).outcome is Decided.FAIL
    leak[100] += 500
    decision = memory_plateau(STEPS, leak, 50_000, 64_000)
    assert decision.outcome is Decided.FAIL
    assert "high-water" in decision.reason


def test_the_slack_is_the_larger_of_64_mib_and_two_per_mille() -> None:
    for base, growth, outcome in (
        (8_000.0, 60.0, Decided.PASS),
        (8_000.0, 70.0, Decided.FAIL),
        (50_000.0, 90.0, Decided.PASS),
        (50_000.0, 110.0, Decided.FAIL),
    ):
        mib = np.full(1200, base)
        mib[650:] += growth
        assert memory_plateau(STEPS, mib, 1200, 64_000).outcome is outcome, (base, growth)


def test_a_slow_leak_is_caught_by_the_projection() -> None:
    """0.05 MiB/step is 30 MiB in the last half: no new mark, but 2.4 GiB by step 50,000."""
    decision = memory_plateau(STEPS, 8000 + 0.05 * STEPS, 50_000, 9_000)
    assert decision.outcome is Decided.FAIL
    assert "by step 50000, limit 9000 MiB" in decision.reason
    assert memory_plateau(STEPS, 8000 + 0.05 * STEPS, 50_000, 16_000).outcome is Decided.PASS


def staircase(rate: float, rise: float, rows: int = 400) -> np.ndarray:
    """Memory of a healthy process on a CPU: it settles, and takes a few pages now and then."""
    random = np.random.default_rng(11)
    settled = 430 + 12 * (1 - np.exp(-np.arange(rows) / 60))
    steps = np.cumsum(random.random(rows) < rate / rise) * rise
    return np.asarray(settled + steps + random.choice([0.0, 0.1], rows))


def test_a_leak_that_goes_on_is_one_whatever_the_headroom() -> None:
    """The logits of a step kept: 7.5 GiB by step 50,000, of 8 that are allowed."""
    steps = np.arange(1, 401)
    healthy = staircase(0.01, 0.6)
    assert memory_plateau(steps, healthy, 50_000, 8_192).outcome is Decided.PASS
    leak = memory_plateau(steps, healthy + 0.149 * steps, 50_000, 16_384)
    assert leak.outcome is Decided.FAIL
    assert "parts of the last half" in leak.reason and "by step 50000" in leak.reason
    # What has stopped growing is none, however steeply it grew.
    stopped = healthy + 0.149 * np.minimum(steps, 200)
    assert memory_plateau(steps, stopped, 50_000, 16_384).outcome is Decided.PASS
    # To the end of a short run it is little.
    assert memory_plateau(steps, healthy + 0.149 * steps, 1200, 16_384).outcome is Decided.PASS


def test_a_projection_that_may_or_may_not_pass_the_limit_is_inconclusive() -> None:
    wild = 8000 + np.random.default_rng(0).normal(0, 20, 1200)
    decision = memory_plateau(STEPS, wild, 50_000, 8_300)
    assert decision.outcome is Decided.INCONCLUSIVE
    assert decision.interval is not None
    assert decision.interval[0] < 8_300 < decision.interval[1]


def test_a_limit_already_passed_fails_and_a_short_run_is_inconclusive() -> None:
    assert memory_plateau(STEPS, LEVEL, 1200, 7_000).outcome is Decided.FAIL
    assert memory_plateau(STEPS[:39], LEVEL[:39], 1200, 9_000).outcome is Decided.INCONCLUSIVE


@given(st.floats(0.1, 10.0))
def test_a_larger_limit_is_never_worse(factor: float) -> None:
    order = [Decided.FAIL, Decided.INCONCLUSIVE, Decided.PASS]
    low = memory_plateau(STEPS, LEVEL, 50_000, 8_000 * factor).outcome
    high = memory_plateau(STEPS, LEVEL, 50_000, 16_000 * factor).outcome
    assert order.index(low) <= order.index(high)


def test_bad_input() -> None:
    with pytest.raises(UsageError, match="do not rise after position 1"):
        memory_plateau([1, 2, 2], [1.0, 1.0, 1.0], 10, 10)
    with pytest.raises(UsageError, match="equal lengths"):
        memory_plateau([1, 2], [1.0, 1.0, 1.0], 10, 10)
    with pytest.raises(UsageError, match="limit"):
        memory_plateau([1, 2], [1.0, 1.0], 10, -1)
    with pytest.raises(UsageError, match="not finite"):
        steady([1.0, math.nan])
    with pytest.raises(UsageError, match="batch is 5"):
        steady(CALM, batch=5)
    with pytest.raises(UsageError, match="tolerance"):
        steady(CALM, tolerance=-0.1)
