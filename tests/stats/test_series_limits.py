"""steady, memory and pace from their formulas, and where their answers turn."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from runbook.errors import UsageError
from runbook.stats import Decided, Decision, FloatArray, pace_of, series, unless_disturbed
from runbook.stats.series import memory_plateau, outside_plateau, stall_share, steady
from tests.factory.tables import rows, table


def run_of(levels: FloatArray, size: int = 50) -> FloatArray:
    """A slow first step, then batches of steps that take so long each (log seconds)."""
    return np.concatenate([[9.0], np.repeat(np.exp(levels), size)])


# steady


@pytest.mark.parametrize(("kept", "batches", "size"), [(80, 8, 10), (103, 8, 12), (1200, 24, 50)])
def test_a_run_is_cut_into_batches(kept: int, batches: int, size: int) -> None:
    decision = steady(np.concatenate([[9.0], np.ones(kept)]))
    assert (decision.outcome, decision.n) == (Decided.PASS, batches)
    assert f"({batches} batches of {size} steps)" in decision.reason
    few = steady(np.concatenate([[9.0], np.ones(79)]))
    assert (few.outcome, few.n) == (Decided.INCONCLUSIVE, 7)


@pytest.mark.parametrize(
    ("memory", "wave", "dependence"), [(0.0, 0.0, "none"), (0.6, 0.0, "some"), (0.0, 0.05, "most")]
)
def test_the_trend_and_the_shift_by_hand(memory: float, wave: float, dependence: str) -> None:
    """Least squares with (1 + r) / (1 - r) for dependence, and every split by a t-test of it."""
    count, noise = 32, np.random.default_rng(4).normal(0, 0.01, 32)
    levels = wave * np.sin(np.arange(count) / 3)
    for at in range(1, count):
        levels[at] += memory * levels[at - 1] + noise[at]
    levels += 0.02 * (np.arange(count) > 17)
    decision = steady(run_of(levels), tolerance=0.9)
    fit = stats.linregress(np.arange(count), levels)
    rest = levels - fit.intercept - fit.slope * np.arange(count)
    lag = (rest[1:] @ rest[:-1]) / (rest @ rest)
    r = min(max((count * lag + 1) / (count - 4), 0.0), 0.8)
    assert (r == 0.0, r == 0.8) == (dependence == "none", dependence == "most")
    factor = (1 + r) / (1 - r)
    half = stats.t.ppf(0.95, count - 2) * fit.stderr * math.sqrt(factor) * count
    total = fit.slope * count
    assert decision.estimate == pytest.approx(math.expm1(total))
    assert decision.interval == pytest.approx((math.expm1(total - half), math.expm1(total + half)))
    found = {}
    for split in range(3, count - 2):
        left, right = levels[:split], levels[split:]
        t = stats.ttest_ind(right, left).statistic
        p = 2 * stats.t.sf(abs(t) / math.sqrt(factor), count - 2) * (count - 5)
        found[split] = min(1.0, p), math.expm1(right.mean() - left.mean())
    best = min(found, key=lambda split: found[split][0])
    split, shift, p = series._change_point(levels, factor)
    assert p == pytest.approx(found[best][0])
    if found[best][0] < 1:
        assert (split, shift) == (best, pytest.approx(found[best][1]))


def test_a_pause_is_two_steps_of_the_trend() -> None:
    """Its whole length is stall already. Steps of a quarter of a second, one of 10 s."""
    times = np.concatenate([[9.0], np.full(1200, 0.25)])
    times[1075] = 10.0
    batches = np.zeros(24)
    batches[21] = math.log(51 / 50)
    fit = stats.linregress(np.arange(24), batches)
    decision = steady(times)
    assert decision.estimate == pytest.approx(math.expm1(24 * fit.slope))
    assert "stall 3.2% of the time, limit 1.0%" in decision.reason


@pytest.mark.parametrize(("tolerance", "found"), [(0.0999, True), (0.1001, False)])
def test_a_shift_is_named_by_its_step(tolerance: float, found: bool) -> None:
    """Of 103 steps after the first, 8 batches of 12: the oldest 7 are left out."""
    times = np.concatenate([[9.0], np.ones(7 + 5 * 12), np.full(36, 1.1)])
    decision = steady(times, tolerance=tolerance)
    assert ("shift of +10.0% at step 68 (p = " in decision.reason) is found


@pytest.mark.parametrize("sign", [1, -1])
def test_a_trend_without_noise_is_inside_or_outside(sign: int) -> None:
    times = run_of(math.log1p(sign * 0.02) * np.arange(24) / 24, 50)
    assert steady(times, tolerance=0.0201).outcome is Decided.PASS
    assert steady(times, tolerance=0.0199).outcome is Decided.FAIL


def test_a_share_of_stalls_at_its_limit_is_within_it() -> None:
    times = np.ones(1201)
    times[[100, 650]] = 3.0
    share = 6 / 1204
    assert stall_share(times[1:]) == pytest.approx(share)
    assert steady(times, stall_limit=share * 1.001).outcome is Decided.PASS
    assert steady(times, stall_limit=share * 0.999).outcome is Decided.FAIL


@pytest.mark.parametrize(
    ("slow", "lost"), [(1.05, 0.0), (1.051, 0.051), (2.0, 1.0), (2.001, 2.001)]
)
def test_what_a_slow_step_counts(slow: float, lost: float) -> None:
    """Beyond 5 % what it lost, beyond twice the median all of it."""
    times = np.full(100, 0.25)
    times[40] *= slow
    assert stall_share(times) == pytest.approx(0.25 * lost / times.sum())


@pytest.mark.parametrize(
    ("noise", "slow", "counts"),
    [(0.02, 1.148, False), (0.02, 1.149, True), (0.2, 1.99, False), (0.2, 2.01, True)],
)
def test_a_slow_step_is_five_robust_deviations_off(noise: float, slow: float, counts: bool) -> None:
    """1.4826 times the median deviation, five times; at most twice the median is no pause."""
    times = 1 + noise * (-1.0) ** np.arange(101)
    times[0], times[100] = 1.0, slow
    assert (stall_share(times) > 0) is counts


# memory

AT = np.arange(1, 401)


def plateau(mib: FloatArray, goal: float = 400, limit: float = 64_000.0) -> Decision:
    return memory_plateau(AT[: mib.size], mib, goal, limit)


def test_the_projection_by_hand() -> None:
    """Sen's slope of twenty medians of the last half, its bounds, from the last twentieth on."""
    mib = 8000 + 0.1 * AT + np.random.default_rng(2).normal(0, 5, 400)
    decision = plateau(mib, 1000)
    half, steps = mib[200:].reshape(20, 10), AT[200:].reshape(20, 10).mean(axis=1)
    level = np.median(half, axis=1)
    slopes = sorted(
        (level[b] - level[a]) / (steps[b] - steps[a]) for a in range(20) for b in range(a + 1, 20)
    )
    reach = stats.norm.ppf(0.95) * math.sqrt(20 * 19 * 45 / 18)
    low, high = slopes[math.floor((190 - reach) / 2)], slopes[math.ceil((190 + reach) / 2)]
    now = np.median(mib[-20:])
    assert decision.estimate == pytest.approx(now + 600 * np.median(slopes))
    assert decision.interval == pytest.approx((now + 600 * low, now + 600 * high))
    past = plateau(mib, 10)  # already over: what is used now is what it will be
    assert past.estimate == pytest.approx(now)


@pytest.mark.parametrize(
    ("base", "growth", "outcome"),
    [(8e3, 64.0, "PASS"), (8e3, 64.5, "FAIL"), (5e4, 100.0, "PASS"), (5e4, 100.5, "FAIL")],
)
def test_a_new_mark_may_be_64_mib_or_two_per_mille_higher(
    base: float, growth: float, outcome: str
) -> None:
    mib = np.full(400, base)
    mib[250:] += growth
    assert plateau(mib).outcome is Decided[outcome]


@pytest.mark.parametrize(("lasts", "outcome"), [(10, "FAIL"), (5, "PASS")])
def test_a_spike_hides_no_growth_that_lasts_for_a_twentieth(lasts: int, outcome: str) -> None:
    mib = np.full(400, 8_000.0)
    mib[50] = 9_000.0
    mib[300 : 300 + lasts] += 100.0
    assert plateau(mib).outcome is Decided[outcome]


def test_forty_rows_are_enough() -> None:
    level = np.full(40, 8_000.0)
    assert plateau(level).outcome is Decided.PASS
    assert plateau(level[1:]).reason == "39 rows; at least 40 are needed"


def test_a_limit_holds_for_what_was_used_and_for_what_will_be() -> None:
    level = np.full(400, 8_000.0)
    assert plateau(level, limit=8_000.0).outcome is Decided.PASS
    assert "8000 MiB were already used, limit 8000" in plateau(level, limit=7_999.9).reason
    growing = 8_000 + 0.1 * AT
    end = 8_000 + 0.1 * 390.5 + 0.1 * 600  # the median of the last 20 rows, and 600 steps on
    assert plateau(growing, 1_000, end * (1 + 1e-9)).outcome is Decided.PASS
    assert plateau(growing, 1_000, end * (1 - 1e-9)).outcome is Decided.FAIL


@pytest.mark.parametrize(
    ("steps", "says"),
    [([1.0, 3.0, 3.0], "after position 1;"), ([1.0, math.nan, 3.0], "after position 0;"),
     ([1.0, 2.0, math.inf], "steps do not rise; allowed")],
)  # fmt: skip
def test_steps_that_do_not_rise(steps: list[float], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        memory_plateau(steps, [1.0, 1.0, 1.0], 10, 10)


# pace


@pytest.mark.parametrize("steps", [2, 4, 5, 12])
def test_the_pace_by_hand(steps: int) -> None:
    """Medians of five steps; noise from neighboring steps of the quietest quarter of blocks."""
    rng = np.random.default_rng(steps)
    times = np.exp(rng.normal(0, 0.03, (7, 3, steps)) + rng.normal(0, 0.1, (7, 1, 1)))
    x = np.log(times)
    x = x - np.array([[[np.median(x[:, arm])] for arm in range(3)]])
    x = x - np.array([[[np.median(x[:, :, at]) for at in range(steps)]]])
    width = min(5, steps)
    blocks = [x[r, a] for r in range(7) for a in range(3)]
    paces = [np.median(b[at : at + width]) for b in blocks for at in range(steps - width + 1)]
    apart = [np.median(np.abs(b[1:] - b[:-1])) for b in blocks]
    sigma = 1.4826 * np.percentile(apart, 25) / math.sqrt(2 * (1 - 0.6))
    found = pace_of(times)
    low, high = np.percentile(paces, [10, 90])
    assert found.spread == pytest.approx(math.exp(high - low) - 1)
    assert found.allowed == pytest.approx(max(0.05, math.exp(3.8 * sigma) - 1))


def test_steps_without_noise_may_be_five_percent_apart() -> None:
    for apart, changed in ((1.049, False), (1.051, True)):
        times = np.ones((10, 2, 6))
        times[::2] *= apart
        pace = pace_of(times)
        assert (pace.allowed, pace.changed) == (0.05, changed)
    wild = np.exp(np.random.default_rng(0).normal(0, 20.0, (4, 2, 6)))
    assert pace_of(wild).allowed == pytest.approx(math.expm1(10.0))
    assert not pace_of(np.ones((3, 2, 1))).changed


@pytest.mark.parametrize("outcome", Decided)
def test_only_an_answer_about_the_arms_rests_on_the_pace(outcome: Decided) -> None:
    times = np.ones((10, 2, 6))
    times[5:] *= 1.5
    said = Decision(outcome=outcome, n=10, reason="so")
    rests = outcome in (Decided.WINNER, Decided.KEEP, Decided.DROP)
    found = unless_disturbed(replace(said, winner="a"), times)
    assert (found.outcome is Decided.INCONCLUSIVE) is (rests or outcome is Decided.INCONCLUSIVE)
    assert found.winner == (None if rests else "a")
    assert unless_disturbed(said, None) == said
    early = replace(said, n=5)  # from the rounds before the machine changed
    assert unless_disturbed(early, times) == early


# Memory read from outside: healthy processes whose allocator fills its free list, and leaks.

SHORT = rows(__file__, "measured")[0]["mib"]


def of(mib: str) -> tuple[np.ndarray, np.ndarray]:
    both = np.array(mib.split(), dtype=float).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def judged(mib: str, limit: float = 16_384.0) -> Decision:
    return outside_plateau(*of(mib), 50_000, limit)


@table(__file__, "measured")
def test_what_may_be_an_allocator_is_no_leak_and_what_became_level_is_none(
    mib: str, outcome: str
) -> None:
    assert memory_plateau(*of(mib), 50_000, 16_384).outcome is Decided.FAIL
    found = judged(mib)
    assert found.outcome is Decided[outcome], found.reason
    words = "level in the last quarter" if outcome == "PASS" else "a leak looks so, and an alloc"
    assert words in found.reason


@pytest.mark.parametrize(
    ("per_step", "outcome"), [(1.0, "INCONCLUSIVE"), (1.6, "FAIL"), (8.0, "FAIL")]
)
def test_what_doubled_and_goes_on_is_a_leak(per_step: float, outcome: str) -> None:
    """900 MiB at first: 1.0 MiB a step leads to 1.7 times that, 1.6 MiB to more than twice."""
    steps = np.arange(1.0, 628.0)
    found = outside_plateau(steps, 900 + per_step * steps, 50_000, 1e9)
    assert found.outcome is Decided[outcome], found.reason
    # One that slows down, or ended, has not been shown to go on.
    slower = 900 + 16 * per_step * np.sqrt(steps * 6)
    assert slower[-1] > 1_800
    assert outside_plateau(steps, slower, 50_000, 1e9).outcome is not Decided.PASS
    ended = 900 + per_step * np.minimum(steps * 3, 900)
    assert outside_plateau(steps, ended, 50_000, 1e9).outcome is Decided.PASS


def test_a_limit_that_is_passed_is_passed() -> None:
    assert "were already used" in judged(SHORT, limit=990).reason
    assert judged(SHORT, limit=990).outcome is Decided.FAIL
    # Level at last, and yet it may come to the limit.
    steps = np.arange(1.0, 1001.0)
    level = 900 + 0.5 * np.clip(steps - 300, 0, 400)
    assert outside_plateau(steps, level, 50_000, 30_000).outcome is Decided.PASS
    assert outside_plateau(steps, level, 50_000, 2_000).outcome is Decided.INCONCLUSIVE
