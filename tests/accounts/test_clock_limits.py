"""How far two clocks may be apart, at the limit and just beyond it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pandas as pd
import pytest

from runbook.accounts import clocks
from tests.accounts.launches import Ranks, changed, honest, steps_of

DT_S = 0.01


def one_rank(
    clock_s: npt.ArrayLike, dt_s: npt.ArrayLike = DT_S, rows: int = 61
) -> tuple[pd.DataFrame, Ranks]:
    """One rank: so long by its clock and by column dt_s; all but step 1 are timed by both."""
    _, ranks = honest()
    longer = pd.DataFrame({"step": range(1, rows + 1), "arm": "", "block": 0, "dt_s": dt_s})
    mono = 500.0 + np.cumsum(np.broadcast_to(clock_s, rows))
    steps = pd.DataFrame({"step": longer["step"], "mono": mono, "alone": True})
    return longer, changed(ranks, 0, steps=steps)[:1]


def agrees(table: pd.DataFrame, ranks: Ranks) -> bool:
    """Of all steps together; rank 0, which writes dt_s, is held to each by itself as well."""
    return clocks.step_clock(table, replace(ranks[0], rank=1), clocks.BusySteps(ranks)) == []


@pytest.mark.parametrize(
    ("rows", "timed", "enough"),
    [(60, 15, True), (60, 14, False), (39, 1, True), (39, 0, False)],
)
def test_a_quarter_of_forty_steps_or_more_has_to_be_timed_by_both(
    rows: int, timed: int, enough: bool
) -> None:
    table, ranks = one_rank(DT_S, rows=rows)
    ranks = steps_of(ranks, 0, alone=table["step"].between(2, timed + 1))
    assert clocks.step_clock(table, ranks[0], clocks.BusySteps(ranks)) == (
        [] if enough else ["rank 0: too few steps have a time in both files"]
    )
    silent = changed(ranks, 0, steps=None)
    assert len(clocks.time_account(table, silent, 100.0)) == 1, "no step_end"


@pytest.mark.parametrize("clock_s", [0.001, 0.1])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_median_step_may_be_off_by_two_percent_and_the_jitter(
    clock_s: float, sign: int
) -> None:
    allowed = 0.02 * clock_s + 50e-6
    assert agrees(*one_rank(clock_s, clock_s - sign * 0.99 * allowed))
    assert not agrees(*one_rank(clock_s, clock_s - sign * 1.01 * allowed))


def test_noise_widens_that_by_three_errors_of_a_median() -> None:
    """Sixty steps 2 ms early or late: three times sqrt(pi / 2) sigma / sqrt(60)."""
    noise = 0.002 * (-1.0) ** np.arange(61)
    error = 3 * math.sqrt(math.pi / 2) * 1.4826 * 0.002 / math.sqrt(60)
    allowed = 0.02 * DT_S + 50e-6 + error
    assert agrees(*one_rank(DT_S, DT_S - 0.99 * allowed + noise))
    assert not agrees(*one_rank(DT_S, DT_S - 1.01 * allowed + noise))


@pytest.mark.parametrize(("share", "good"), [(0.99, True), (1.01, False)])
def test_all_steps_together_may_be_off_by_two_percent_and_one_pause(
    share: float, good: bool
) -> None:
    """Of 0.6 s by the clock, 0.112 s; a pause that the clock sees is part of its time."""
    step_30 = np.arange(1, 62) == 30
    assert agrees(*one_rank(DT_S, DT_S + share * 0.112 * step_30)) is good
    assert agrees(*one_rank(DT_S + share * 0.112 / 0.98 * step_30)) is good


def test_what_a_rank_does_beside_a_step_takes_that_step_out_and_the_next_of_others() -> None:
    table, ranks = honest()
    ranks = steps_of(ranks, 0, alone=table["step"] != 20)
    left_out = []
    for rank in ranks:
        both = clocks.clocked_steps(table, rank, clocks.BusySteps(ranks))
        left_out.append(set(table["step"]) - set(both["step"]))
    assert left_out == [{1, 20}, {1, 20, 21}]
    silent = changed(ranks, 0, steps=None)
    assert clocks.step_clock(table, silent[1], clocks.BusySteps(silent)) == []


def test_the_ratio_of_the_clocks_leaves_warm_up_out() -> None:
    """Steps up to 30 take twice what dt_s says, the 31 from there on do not."""
    table, ranks = one_rank(np.where(np.arange(1, 62) <= 30, 2 * DT_S, DT_S))

    def ratio(first_step: int) -> float:
        return clocks.clock_ratio(table, ranks[0], clocks.BusySteps(ranks), first_step=first_step)

    assert ratio(31) == pytest.approx(1.0)
    assert ratio(30) == pytest.approx(33 / 32)
    assert clocks.clock_ratio(table, ranks[0], clocks.BusySteps(ranks)) == pytest.approx(
        (2 * 29 + 31) / 60
    )
    assert ratio(62) == 1.0


def test_without_both_times_there_is_no_ratio() -> None:
    table, ranks = one_rank(3 * DT_S)
    silent = changed(ranks, 0, steps=None)
    for frame, rank in ((table.drop(columns="dt_s"), ranks[0]), (table, silent[0])):
        assert clocks.clocked_steps(frame, rank, clocks.BusySteps(ranks)) is None
        assert clocks.clock_ratio(frame, rank, clocks.BusySteps(ranks)) == 1.0
        assert "too few steps" in clocks.step_clock(frame, rank, clocks.BusySteps(ranks))[0]


@pytest.mark.parametrize(("timed", "agreed"), [(3, True), (9, True), (10, False)])
def test_a_few_steps_have_no_middle_to_hold(timed: int, agreed: bool) -> None:
    """Steps of 50 ms of which dt_s tells 4 ms too much on a rank that waits for another one.

    Three of three may lie on one side by chance (one time in four), ten of ten may not.
    """
    late = np.resize([0.0041, 0.0040, 0.0039], timed + 1)
    table, ranks = one_rank(0.05, 0.05 + late, rows=timed + 1)
    assert agrees(table, ranks) == agreed


def test_a_few_steps_are_held_in_their_sum() -> None:
    """Three steps of a second: 2 % of them and a pause of 0.1 s, and not a millisecond more."""
    assert agrees(*one_rank(1.0, 1.053, rows=4))
    assert not agrees(*one_rank(1.0, 1.054, rows=4))


def in_stretches(late_s: float, *, dt_s: npt.ArrayLike = 0.05) -> tuple[pd.DataFrame, Ranks]:
    """Sixty steps of 50 ms, of which an evaluation takes every fifth; the next but one is late."""
    steps = np.arange(1, 62)
    table, ranks = one_rank(0.05 + late_s * (steps % 5 == 2), dt_s)
    return table, steps_of(ranks, 0, alone=steps % 5 != 0)


def test_a_rank_may_be_off_by_half_a_step_at_each_end_of_a_stretch() -> None:
    """Between evaluations its place among the others is another each time, and sums to nothing."""
    assert agrees(*in_stretches(0.024))
    assert not agrees(*in_stretches(0.045))
    assert not agrees(*in_stretches(0.0, dt_s=0.04)), "a fifth too short in every step"
