"""The time that steps waited for data has a second source: the marks around it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest

from nsa.contract import Event
from runbook.accounts.between_steps import fetch_account
from runbook.accounts.tables import copy_account
from tests.accounts.launches import STEPS, Ranks, changed, honest, steps_of

# A slow loader: every step waits 10 ms, the marks are written 0.03 ms apart.
WAITED, MARKED = 0.01, 0.01003


def account(table: pd.DataFrame, ranks: Ranks, device: str = "cpu") -> list[str]:
    return fetch_account(table, ranks, device)


def waiting(said: Any, clock: Any = MARKED, *, csv: Any = None) -> tuple[pd.DataFrame, Ranks]:
    """Both ranks wait; rank 1 tells `said` of it, and training.csv `csv`."""
    table, ranks = honest()
    table = table.assign(fetch_s=WAITED if csv is None else csv)
    ranks = steps_of(ranks, 0, fetch_s=table["fetch_s"], fetch_clock_s=MARKED)
    return table, steps_of(ranks, 1, fetch_s=said, fetch_clock_s=clock)


def test_what_was_waited_for_lies_between_the_marks() -> None:
    assert account(*honest()) == []
    assert account(*waiting(WAITED)) == []
    # A busy machine pauses a rank at that place, now and then.
    pauses = MARKED + 0.01 * (np.arange(STEPS) % 20 == 0)
    assert account(*waiting(WAITED, pauses)) == []


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        (
            0.0,
            "rank 1 says that a typical step waits 0 s for data, between its marks lie 0.01",
        ),
        (WAITED / 10, "rank 1 says that a typical step waits 0.001 s"),
        (WAITED / 2, "rank 1 says that a typical step waits 0.005 s"),
        (-WAITED, "rank 1 says that a step waited -0.01 s for data"),
        (1e308, "rank 1 says that a step waited 1e+308 s for data"),
        (math.nan, "rank 1 does not say how long its steps waited for data"),
        (2 * WAITED, "rank 1 says that a step waited 0.02 s for data"),
    ],
)
def test_another_time_than_that_between_the_marks_is_seen(said: float, wanted: str) -> None:
    assert account(*waiting(said))[0].startswith(wanted)


def test_a_wait_that_is_rare_and_long_cannot_be_left_out() -> None:
    clock = np.where(np.arange(STEPS) == 33, 2.0, MARKED)
    (text,) = account(*waiting(WAITED, clock))
    assert text == "rank 1 says that it waited 0.6 s for data, between its marks lie 2.592 s"
    assert account(*waiting(clock - 3e-5, clock)) == []


def test_the_csv_is_held_against_rank_0() -> None:
    (text,) = account(*waiting(WAITED, csv=0.001))
    assert text.startswith("rank 0 says that a typical step waits 0.001 s for data")
    table, ranks = honest()
    assert copy_account(table.assign(fetch_s=2.6e-4), ranks)[0].startswith(
        "fetch_s of step 1 is 0.00026 in the CSV and 0.00025 in rank 0's heartbeats"
    )
    assert account(table.drop(columns="fetch_s"), ranks) == ["the CSV has no column fetch_s"]


def test_steps_with_more_between_the_marks_are_left_out_and_missing_marks_are_said() -> None:
    clock = np.where(np.arange(STEPS) < 10, 1.0, MARKED)
    table, ranks = waiting(WAITED, clock)
    assert account(table, ranks)
    for kind in (Event.MEMORY_DUMP, Event.PROFILER):
        dumps = {step: frozenset({str(kind)}) for step in range(1, 11)}
        assert account(table, changed(ranks, 1, beside=dumps)) == []
        always = dict.fromkeys(range(1, STEPS + 1), frozenset({str(kind)}))
        assert account(table, changed(ranks, 1, beside=always)) == []
    unmarked = np.where(np.arange(STEPS) == 7, np.nan, MARKED)
    assert account(*waiting(WAITED, unmarked)) == ["rank 1 does not mark when it had its data"]


def test_writing_the_first_mark_takes_longer_on_cuda() -> None:
    # Medians of one H200's twelve steps: 0.38 ms told, 0.30 ms for the mark.
    table, ranks = waiting(3.8e-4, 6.8e-4, csv=WAITED)
    assert account(table, ranks, "cuda") == []
    assert "rank 1 says that a typical step waits 0.00038 s" in account(table, ranks, "cpu")[0]
    assert account(*waiting(WAITED / 10), device="cuda")
