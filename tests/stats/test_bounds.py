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
