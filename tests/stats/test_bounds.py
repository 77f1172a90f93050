"""Every number that a caller may set: accepted inside its range, refused at its ends and beyond."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from runbook.errors import UsageError
from runbook.stats.launches import scaling
from runbook.stats.pairs import non_inferiority
from runbook.stats.steady import steady

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
