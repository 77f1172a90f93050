"""What a caller may set, and what a decision says to code; its reason is for people."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import runbook
from runbook.errors import UsageError
from runbook.records import Outcome
from runbook.stats.decision import Decided
from runbook.stats.launches import scaling
from runbook.stats.pairs import non_inferiority
from runbook.stats.steady import memory_plateau, stall_share, steady

TIMES = np.full(400, 0.01)
PAIR = ([1.0, 1.1, 1.2], [1.0, 1.1, 1.2])

# The least value above which, and the greatest below which, each is allowed.
RANGES: list[tuple[str, Callable[[float], Any], float, float]] = [
    ("limit", lambda x: scaling(*PAIR, 2, limit=x), 0.0, 1.05),
    ("margin", lambda x: non_inferiority(*PAIR, margin=x), 0.0, 0.5),
    ("error", lambda x: non_inferiority(*PAIR, error=x), 0.0, 0.5),
    ("tolerance", lambda x: steady(TIMES, tolerance=x), 0.0, 1.0),
    ("stall_limit", lambda x: steady(TIMES, stall_limit=x), 0.0, 1.0),
]


@pytest.mark.parametrize(("name", "call", "low", "high"), RANGES)
def test_a_number_has_to_lie_inside_its_range(
    name: str, call: Callable[[float], Any], low: float, high: float
) -> None:
    for value in (low + 1e-6, high - 1e-6):
        call(value)
    for value in (low, high, math.nan):
        with pytest.raises(UsageError, match=f"{name} is "):
            call(value)


OURS = ("stats", "tools", "engine", "records", "cli")
CHOICES = {Decided.WINNER, Decided.TIE, Decided.KEEP, Decided.DROP}


@pytest.mark.parametrize("outcome", Decided)
def test_what_the_check_says(outcome: Decided) -> None:
    wanted = Outcome.PASS if outcome in CHOICES else Outcome[outcome.name]
    assert outcome.as_check is wanted


def test_nobody_reads_an_outcome_out_of_a_reason() -> None:
    """An optimizer setting was exported if a sentence began with KEEP."""
    parsed = re.compile(r"reason\.(startswith|partition|split|find|index)\(|in \w+\.reason\b")
    root = Path(runbook.__file__).parents[1]
    # The launcher reads the reason that a trainer of any make gives for its end: that is text.
    rooms = [root / name for name in ("phases", "reports", *map("runbook/{}".format, OURS))]
    found = [
        str(path)
        for room in rooms
        for path in room.rglob("*.py")
        if parsed.search(path.read_text("utf-8"))
    ]
    assert found == []


# steady and memory_plateau: decisions about one run's series.

RNG = np.random.default_rng(0)
# The first step allocates and compiles: it is always cut, 24 batches of 50 are left.
CALM = np.concatenate([[2.0], 0.5 * np.exp(RNG.normal(0, 0.02, 1200))])
STEPS = np.arange(1200)


# steady


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


def test_noise_alone_is_no_stall() -> None:
    """Under one false alarm in a hundred, whatever the spread; here none."""
    for sd in (0.001, 0.01, 0.035, 0.06):
        noise = np.random.default_rng(3).normal(0, sd, (200, 1200))
        assert max(stall_share(row) for row in np.exp(noise)) < 0.01


# memory


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
    assert decision.interval[0] < 8_300 < decision.interval[1]


def test_bad_input() -> None:
    with pytest.raises(UsageError, match="limit"):
        memory_plateau([1, 2], [1.0, 1.0], 10, -1)
    with pytest.raises(UsageError, match="not finite"):
        steady([1.0, math.nan])
