"""A loss against earlier runs: how often it is shown without one, and with one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from runbook.errors import UsageError
from runbook.stats.decision import Decided
from runbook.stats.levels import LEVEL_RUNS, below_level, loss_shown

ALLOWED = 0.05
MACHINES = {"calm": 0.02, "noisy": 0.035, "v4-like": 0.05}
RUNS = 400
# Declared 1 %, and two standard errors of 400 simulated runs.
MOST_WRONG = 0.01 + 2 * math.sqrt(0.01 * 0.99 / RUNS)


def nights(spread: float, seed: int, loss: float = 0.0) -> Iterator[list[float]]:
    """Three launches a night; half of their variance is the night's own."""
    random = np.random.default_rng(seed)
    part = spread * math.sqrt(0.5)
    while True:
        middle = 1e5 * (1 - loss) * math.exp(random.normal(0, part))
        yield [middle * math.exp(random.normal(0, part)) for _ in range(3)]


def mean(rates: list[float]) -> float:
    return math.exp(sum(map(math.log, rates)) / len(rates))


def share(decide: Callable[[int], Decided]) -> float:
    return sum(decide(seed) is Decided.FAIL for seed in range(RUNS)) / RUNS


def last(spread: float, loss: float) -> float:
    def decide(seed: int) -> Decided:
        before, now = next(nights(spread, seed)), next(nights(spread, seed + 10_000, loss))
        return loss_shown(before, now, allowance=ALLOWED).outcome

    return share(decide)


def level(spread: float, loss: float, runs: int = 30) -> float:
    def decide(seed: int) -> Decided:
        source = nights(spread, seed)
        history = [mean(next(source)) for _ in range(runs)]
        now = mean(next(nights(spread, seed + 10_000, loss)))
        return below_level(history, now, allowance=ALLOWED).outcome

    return share(decide)


@pytest.mark.parametrize("machine", MACHINES)
def test_equal_runs_show_no_loss(machine: str) -> None:
    spread = MACHINES[machine]
    assert last(spread, 0.0) <= MOST_WRONG
    assert level(spread, 0.0) <= MOST_WRONG
    assert level(spread, 0.0, runs=LEVEL_RUNS) <= MOST_WRONG


def test_a_large_loss_is_shown_by_the_first_run_that_has_it() -> None:
    assert last(MACHINES["calm"], 0.15) >= 0.95
    assert last(MACHINES["noisy"], 0.30) >= 0.98
    assert level(MACHINES["noisy"], 0.15) >= 0.90
    assert last(MACHINES["v4-like"], 2 / 3) == 1.0


def eroded(spread: float, seed: int, *, by: float, whole: bool) -> float:
    """The loss at which a machine that loses `by` every night is stopped; `whole`: both rules."""
    source = nights(spread, seed)
    accepted = [next(source) for _ in range(10)]
    for night in range(1, 61):
        now = [rate * (1 - by) ** night for rate in next(source)]
        found = [loss_shown(accepted[-1], now, allowance=ALLOWED)]
        if whole:
            found.append(below_level([mean(one) for one in accepted], mean(now), allowance=ALLOWED))
        if any(one.outcome is Decided.FAIL for one in found):
            return 1 - (1 - by) ** night
        accepted.append(now)
    return 1 - (1 - by) ** 60


@pytest.mark.parametrize("machine", ["calm", "noisy"])
def test_one_percent_a_night_does_not_pass_for_long(machine: str) -> None:
    losses = [eroded(MACHINES[machine], seed, by=0.01, whole=True) for seed in range(100)]
    assert float(np.quantile(losses, 0.95)) <= (0.12 if machine == "calm" else 0.17)
    alone = [eroded(MACHINES["calm"], seed, by=0.01, whole=False) for seed in range(40)]
    assert float(np.median(alone)) > 0.3, "the last run alone would let it pass: see the level"


def test_one_lucky_run_is_no_level() -> None:
    calm = [mean(next(nights(0.02, seed))) for seed in range(12)]
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
