"""Every number that a caller may set: accepted inside its range, refused at its ends and beyond."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from runbook.errors import UsageError
from runbook.stats.arms import judge_rounds
from runbook.stats.launches import scaling
from runbook.stats.pairs import non_inferiority
from runbook.stats.plans import InterimPlan
from runbook.stats.steady import steady

TIMES = np.full(400, 0.01)
ARMS, EVEN = ("a", "b"), np.ones((3, 2))
PAIR = ([1.0, 1.1, 1.2], [1.0, 1.1, 1.2])

# The least value above which, and the greatest below which, each is allowed.
RANGES: list[tuple[str, Callable[[float], Any], float, float]] = [
    ("error", lambda x: judge_rounds(ARMS, EVEN, error=x), 0.0, 0.5),
    (
        "min_effect",
        lambda x: judge_rounds(ARMS, EVEN, error=0.01, min_effect=x),
        0.0,
        1.0,
    ),
    ("error", lambda x: InterimPlan(analyses=(3,), error=x), 0.0, 0.5),
    ("rounds", lambda x: InterimPlan(analyses=(3,)).unspent(int(x)), 0, math.inf),
    ("limit", lambda x: scaling(*PAIR, 2, limit=x), 0.0, 1.05),
    ("margin", lambda x: non_inferiority(*PAIR, margin=x), 0.0, 0.5),
    ("error", lambda x: non_inferiority(*PAIR, error=x), 0.0, 0.5),
    ("tolerance", lambda x: steady(TIMES, tolerance=x), 0.0, 1.0),
    ("stall_limit", lambda x: steady(TIMES, stall_limit=x), 0.0, 1.0),
    ("batch", lambda x: steady(TIMES, batch=int(x)), 9, math.inf),
]


@pytest.mark.parametrize(("name", "call", "low", "high"), RANGES)
def test_a_number_has_to_lie_inside_its_range(
    name: str, call: Callable[[float], Any], low: float, high: float
) -> None:
    whole = name in ("rounds", "batch")
    inside = (low + 1,) if whole else (low + 1e-6, high - 1e-6)
    outside = (low,) if whole else (low, high, math.nan)
    for value in inside:
        call(value)
    for value in outside:
        with pytest.raises(UsageError, match=f"{name} is "):
            call(value)
