"""One time by three clocks: pauses are no fraud, and no fraud passes for a pause."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from runbook.accounts import clocks
from runbook.records.evidence import RankLog
from tests.accounts.launches import (
    RANKS,
    all_accounts,
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


def test_what_is_done_between_the_arms_of_a_round_is_left_out() -> None:
    """Two arms of one round; DDP is wrapped anew for 9 s before the second one."""
    table, ranks = honest()
    table = table.assign(arm=["a"] * 30 + ["b"] * 30)
    for number in range(RANKS):
        ranks = steps_of(ranks, number, mono=late_by(lambda step: 9.0 * (step >= 31)))
    assert clocks.step_clock(table, ranks[0], clocks.BusySteps(ranks)) == []
    assert clocks.step_clock(table.assign(arm="a"), ranks[0], clocks.BusySteps(ranks)) != []


def test_what_rank_0_does_beside_a_step_the_others_wait_for_in_the_next() -> None:
    """Rank 0 writes a trace for 9 s at the end of step 30, which dt_s leaves out as it should."""
    table, ranks = honest()
    for number in range(RANKS):
        late = late_by(lambda step, first=30 + number: 9.0 * (step >= first))
        ranks = steps_of(ranks, number, mono=late)
    beside = steps_of(ranks, 0, alone=table["step"] != 30)
    assert clocks.time_account(table, beside, None) == []
    assert len(clocks.time_account(table, ranks, None)) == RANKS


def long_table(**changed: float) -> pd.DataFrame:
    """1,000 steps of 10 ms that jitter by 1 %.

    drift: by so much slower at last. pause: so many s more in each of ten steps.
    """
    table = pd.DataFrame({"step": range(1, 1001)})
    dt = 0.01 * np.random.default_rng(5).normal(1, 0.01, len(table))
    dt *= np.linspace(1, 1 + changed.get("drift", 0.0), len(table))
    dt[[*range(300, 310)]] += changed.get("pause", 0.0)
    columns = {"loss": 1.0, "grad_norm": 1.0, "toks_per_s": 1.0}
    return table.assign(dt_s=dt, arm="", block=0, **columns)


@pytest.mark.parametrize("usual_s", [0.06, 1.0])
@pytest.mark.parametrize("off_s", [-0.04, 0.04])
def test_one_step_of_another_length_is_noticed_however_long_steps_are(
    usual_s: float, off_s: float
) -> None:
    """In 1,000 steps of 1 s, of which two clocks may be a whole second apart at the end."""
    table = long_table()
    table["dt_s"] *= usual_s / 0.01
    ranks = tuple(rank(number, table) for number in range(RANKS))
    lied = table.assign(dt_s=table["dt_s"] + off_s * (table["step"] == 970))
    busy = clocks.BusySteps(ranks)
    assert clocks.step_clock(table, ranks[0], busy) == []
    (text,) = clocks.step_clock(lied, ranks[0], busy)
    assert text.startswith("dt_s moves step ends by 0.0")
    drifted = steps_of(ranks, 0, mono=ranks[0].steps["mono"] * 1.0005)
    assert clocks.step_clock(table, drifted[0], busy) == []


def test_a_host_that_is_a_step_ahead_of_its_device_is_no_fraud() -> None:
    """On CUDA a step is noted when the one before has ended; where the host is slow, at its end.

    Ten steps take six times as long, one pauses, and at last the host falls behind.
    """
    table = long_table(pause=0.05)
    table.loc[600, "dt_s"] = 3.0
    ends = table["dt_s"].cumsum()
    noted = pd.Series(np.where(table["step"] > 800, ends, ends.shift(fill_value=0.0)))
    noted += np.where(table["step"] % 50 == 0, 0.1, 0.0)
    ranks = tuple(rank(number, table) for number in range(RANKS))
    ahead = steps_of(ranks, 0, mono=noted)
    assert clocks.step_clock(table, ahead[0], clocks.BusySteps(ahead), lag=1) == []
    assert clocks.step_clock(table, ahead[0], clocks.BusySteps(ahead)) != []


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
    assert clocks.step_clock(table, ranks[0], clocks.BusySteps(ranks), lag=1) == []
    (problem,) = clocks.step_clock(table, ranks[0], clocks.BusySteps(ranks))
    assert problem.startswith("dt_s sums to 1.034 of what rank 0's clock shows")
    for factor in (0.95, 1.05):
        lied = table.assign(dt_s=table["dt_s"] * factor)
        assert len(clocks.step_clock(lied, ranks[0], clocks.BusySteps(ranks), lag=1)) == 1


def test_a_stall_that_dt_s_leaves_out_is_seen_in_its_block() -> None:
    """0.2 s in one step of a block, which is more than being ahead explains."""
    table, ranks = real_steps()
    stalled = steps_of(ranks, 0, mono=late_by(lambda step: 0.2 * (step >= 113)))
    (problem,) = clocks.step_clock(table, stalled[0], clocks.BusySteps(stalled), lag=1)
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
