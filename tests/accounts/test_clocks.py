"""One time by three clocks: pauses are no fraud, and no fraud passes for a pause."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pytest

from runbook.accounts import clocks
from runbook.records.evidence import RankLog
from tests.accounts.launches import (
    RANKS,
    Ranks,
    all_accounts,
    changed,
    honest,
    rank,
    rows,
    steps_of,
)


def late_by(seconds: Callable[[pd.Series], Any]) -> Callable[[pd.DataFrame], pd.Series]:
    """The ends of a rank's steps, later by so much."""
    return lambda told: told["mono"] + seconds(told["step"])


def test_a_pause_of_the_machine_between_a_step_and_its_heartbeat_is_no_fraud() -> None:
    table, ranks = honest()
    late = late_by(lambda step: 0.05 * (step == 30))
    assert all_accounts(table, steps_of(ranks, 1, mono=late)) == []


def test_both_clocks_of_a_rank_slowed_alike_are_held_by_its_wall_clock() -> None:
    _, ranks = honest()
    steps = ranks[0].steps
    wall = 1.7e9 + steps["mono"]
    assert clocks.wall_clock(steps_of(ranks, 0, ts=wall)[0]) == []
    put_back = wall - 3600.0 * (steps["step"] > 30)
    assert clocks.wall_clock(steps_of(ranks, 0, ts=put_back)[0]) == []
    (text,) = clocks.wall_clock(steps_of(ranks, 0, ts=wall, mono=steps["mono"] * 0.8)[0])
    assert text.startswith("rank 0: a typical step takes 0.0079 s by the monotonic clock and 0.00")


def test_what_rank_0_does_beside_a_step_the_others_wait_for_in_the_next() -> None:
    """Rank 0 writes a trace for 9 s at the end of step 30, which dt_s leaves out as it should."""
    table, ranks = honest()
    for number in range(RANKS):
        late = late_by(lambda step, first=30 + number: 9.0 * (step >= first))
        ranks = steps_of(ranks, number, mono=late)
    beside = steps_of(ranks, 0, alone=table["step"] != 30)
    assert clocks.time_account(table, beside, None) == []
    assert len(clocks.time_account(table, ranks, None)) == RANKS


@pytest.mark.parametrize("usual_s", [0.06, 1.0])
@pytest.mark.parametrize("off_s", [-0.04, 0.04])
def test_one_step_of_another_length_is_noticed_however_long_steps_are(
    usual_s: float, off_s: float
) -> None:
    """In 1,000 steps of 1 s, of which two clocks may be a whole second apart at the end."""
    dt = usual_s * np.random.default_rng(5).normal(1, 0.01, 1000)
    table = pd.DataFrame({"step": range(1, 1001), "dt_s": dt, "arm": "", "block": 0})
    table = table.assign(loss=1.0, grad_norm=1.0, toks_per_s=1.0)
    ranks = tuple(rank(number, table) for number in range(RANKS))
    lied = table.assign(dt_s=table["dt_s"] + off_s * (table["step"] == 970))
    busy = clocks.busy_steps(ranks)
    assert clocks.step_clock(table, ranks[0], busy) == []
    (text,) = clocks.step_clock(lied, ranks[0], busy)
    assert text.startswith("dt_s moves step ends by 0.0")
    drifted = steps_of(ranks, 0, mono=ranks[0].steps["mono"] * 1.0005)
    assert clocks.step_clock(table, drifted[0], busy) == []


# Of a launch on an NVIDIA H100 whose layers are replayed: twelve blocks of two arms, by dt_s (the
# device's ends) and by the host's heartbeats.
REAL = Path(__file__).parent / "fixtures/steps_h100_two_arms.csv"


def real_steps() -> tuple[pd.DataFrame, tuple[RankLog, ...]]:
    table = pd.read_csv(REAL)
    alone = table["alone"].astype(bool)
    ranks = steps_of((rank(0, table),), 0, mono=table["mono"], alone=alone)
    return table.drop(columns=["mono", "alone"]), ranks


def test_a_host_that_gets_ahead_in_every_block_is_no_fraud() -> None:
    """Each block begins side by side and ends with the host up to a step ahead: 3 % in all."""
    table, ranks = real_steps()
    assert table.groupby(["block", "arm"]).ngroups == 12
    assert clocks.step_clock(table, ranks[0], clocks.busy_steps(ranks), lag=1) == []
    (problem,) = clocks.step_clock(table, ranks[0], clocks.busy_steps(ranks))
    assert problem.startswith("dt_s sums to 1.034 of what rank 0's clock shows")
    assert "steps, allowed are 0.9" in problem
    for factor in (0.95, 1.05):
        lied = table.assign(dt_s=table["dt_s"] * factor)
        assert len(clocks.step_clock(lied, ranks[0], clocks.busy_steps(ranks), lag=1)) == 1


def test_a_typical_step_of_another_length_is_told_by_its_share_alone() -> None:
    """Where the sum of all would still be within what it may be off."""
    dt = np.where(np.arange(40) % 10 == 0, 5.0, 0.01)
    table = pd.DataFrame({"step": range(1, 41), "dt_s": dt, "arm": "", "block": 0})
    table = table.assign(loss=1.0, grad_norm=1.0, toks_per_s=1.0)
    ranks = (rank(0, table),)
    lied = table.assign(dt_s=dt * np.where(dt < 1.0, 0.9, 1.0))
    assert clocks.step_clock(table, ranks[0], clocks.busy_steps(ranks)) == []
    (text,) = clocks.step_clock(lied, ranks[0], clocks.busy_steps(ranks))
    assert text == "dt_s sums to 0.998 of what rank 0's clock shows for the same 39 steps"


def test_a_stall_that_dt_s_leaves_out_is_seen_in_its_block() -> None:
    """0.2 s in one step of a block, which is more than being ahead explains."""
    table, ranks = real_steps()
    stalled = steps_of(ranks, 0, mono=late_by(lambda step: 0.2 * (step >= 113)))
    (problem,) = clocks.step_clock(table, stalled[0], clocks.busy_steps(stalled), lag=1)
    assert "moves step ends by" in problem


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("stalls", [False, True])
def test_waiting_for_data_cannot_leave_dt_s(share: float, stalls: bool) -> None:
    """A quarter of a millisecond in each step, or a batch in twenty that comes late."""
    table = rows()
    table["dt_s"] *= 3
    if stalls:
        table["fetch_s"] = np.where(table["step"] % 20 == 5, 0.3, 2e-5)
        table["dt_s"] += table["fetch_s"]
    truth = (rank(0, table), rank(1, table))
    assert clocks.time_account(table, truth, None) == []
    told = table.assign(dt_s=table["dt_s"] - share * table["fetch_s"])
    (problem,) = clocks.time_account(told, (truth[0],), None)
    assert problem.startswith("dt_s leaves out what waits for data" if not stalls else "dt_s sums")


def test_few_stalls_in_a_long_launch_cannot_leave_dt_s() -> None:
    """1 s in 60 s, of a device that its host is ahead of."""
    table = pd.concat([rows()] * 100, ignore_index=True)
    table["step"] = range(1, len(table) + 1)
    table["fetch_s"] = np.where(table["step"] % 2000 == 5, 0.3, 2e-5)
    table["dt_s"] += table["fetch_s"]
    truth = rank(0, table)
    assert clocks.time_account(table, (truth,), None, lag=1) == []
    told = table.assign(dt_s=table["dt_s"] - table["fetch_s"])
    (problem,) = clocks.time_account(told, (truth,), None, lag=1)
    assert problem.startswith("dt_s leaves out what waits for data, or ")
    assert ": 1.02 s of 5999 steps, which waited 1.02 s; 2e-05 s of a typical one" in problem


def test_a_step_goes_on_where_arm_and_block_are_those_of_the_one_before() -> None:
    arms, blocks = ["a", "a", None, None, "b", "b"], [0, 0, 0, 0, 1, 2]
    both = pd.DataFrame({"arm": pd.Series(arms, dtype=object), "block": blocks})
    assert clocks.goes_on(both).tolist() == [False, True, False, False, False, False]
    assert clocks.goes_on(both[["block"]]).tolist() == [False, True, True, True, False, False]
    assert clocks.goes_on(both[[]]).tolist() == [True] * 6


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
    other = replace(ranks[0], rank=1)
    return clocks.step_clock(table, other, clocks.busy_steps((other,))) == []


@pytest.mark.parametrize(
    ("rows", "timed", "enough"),
    [(60, 14, False), (40, 10, True), (40, 9, False), (39, 1, True), (39, 0, False)],
)
def test_a_quarter_of_forty_steps_or_more_has_to_be_timed_by_both(
    rows: int, timed: int, enough: bool
) -> None:
    table, ranks = one_rank(DT_S, rows=rows)
    ranks = steps_of(ranks, 0, alone=table["step"].between(2, timed + 1))
    assert clocks.step_clock(table, ranks[0], clocks.busy_steps(ranks)) == (
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
    for one in ranks:
        both = clocks.clocked_steps(table, one, clocks.busy_steps(ranks))
        left_out.append(set(table["step"]) - set(both["step"]))
    assert left_out == [{1, 20}, {1, 20, 21}]
    silent = changed(ranks, 0, steps=None)
    assert clocks.step_clock(table, silent[1], clocks.busy_steps(silent)) == []


def test_the_ratio_of_the_clocks_leaves_warm_up_out() -> None:
    """Steps up to 30 take twice what dt_s says, the 31 from there on do not."""
    table, ranks = one_rank(np.where(np.arange(1, 62) <= 30, 2 * DT_S, DT_S))

    def ratio(first_step: int) -> float:
        return clocks.clock_ratio(table, ranks[0], clocks.busy_steps(ranks), first_step=first_step)

    assert ratio(31) == pytest.approx(1.0)
    assert ratio(30) == pytest.approx(33 / 32)
    assert clocks.clock_ratio(table, ranks[0], clocks.busy_steps(ranks)) == pytest.approx(
        (2 * 29 + 31) / 60
    )
    assert ratio(62) == 1.0


def test_without_both_times_there_is_no_ratio() -> None:
    table, ranks = one_rank(3 * DT_S)
    silent = changed(ranks, 0, steps=None)
    for frame, one in ((table.drop(columns="dt_s"), ranks[0]), (table, silent[0])):
        assert clocks.clocked_steps(frame, one, clocks.busy_steps(ranks)) is None
        assert clocks.clock_ratio(frame, one, clocks.busy_steps(ranks)) == 1.0
        assert "too few steps" in clocks.step_clock(frame, one, clocks.busy_steps(ranks))[0]


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
