"""Steps with something beside them: its time is none of theirs, and all of theirs is counted."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from nsa.contract.digests import recomputed_steps
from runbook.accounts.between_steps import beside_account, restart_account
from tests.accounts.launches import RANKS, STEPS, Ranks, honest, rank, rows, steps_of

EVALUATED = ("eval_start", "eval")
SAVED = ("eval_start", "eval", "checkpoint_start", "checkpoint")
TWICE = ("recomputed",)


def doing(
    kinds: Collection[str], steps: Collection[int], took_s: float
) -> tuple[pd.DataFrame, Ranks]:
    """A launch in which something took so long before the mark that these steps are timed from."""
    table, ranks = honest()
    here = table["step"].isin(steps)
    more = np.where(here, took_s, 0.0)
    mono = 500.0 + (table["dt_s"] + more).cumsum()
    for number in range(len(ranks)):
        ranks = steps_of(ranks, number, mono=mono, timed_from=mono - table["dt_s"])
    beside = {step: frozenset(kinds) for step in steps}
    return table, tuple(replace(rank, beside=beside) for rank in ranks)


def told(table: pd.DataFrame, steps: Collection[int], seconds: float) -> pd.DataFrame:
    """The same table, in which these steps took so much longer."""
    return table.assign(dt_s=table["dt_s"] + np.where(table["step"].isin(steps), seconds, 0.0))


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("kinds", [EVALUATED, SAVED, TWICE])
def test_a_step_is_timed_from_where_what_is_beside_it_ends(
    kinds: Collection[str], lag: int
) -> None:
    table, ranks = doing(kinds, (21, 31, 41), 9.0)
    assert restart_account(table, ranks, lag=lag) == []


def test_a_short_evaluation_that_counts_is_noticed_in_the_middle_of_three() -> None:
    steps = (21, 31, 41)
    table, ranks = doing(EVALUATED, steps, 0.03)
    assert restart_account(table, ranks) == []
    assert len(restart_account(told(table, steps, 0.03), ranks)) == 1
    assert len(restart_account(told(table, steps, -0.02), ranks)) == 1
    # One may be a pause of the machine between the mark and the clock.
    assert restart_account(told(table, (21,), 0.03), ranks) == []
    assert restart_account(told(table, steps, 0.014), ranks) == []


@pytest.mark.parametrize(
    ("late_s", "found"),
    [((0.48,), 0), ((0.52,), 1), ((0.48, 0.09), 0), ((0.48, 0.12), 1), ((0.12, -0.12), 1)],
)
def test_one_pause_of_the_machine_is_no_fraud_and_two_are(
    late_s: tuple[float, ...], found: int
) -> None:
    table, ranks = doing(EVALUATED, (11, 21, 31, 41, 51), 9.0)
    for step, seconds in zip((21, 41), late_s, strict=False):
        table = told(table, (step,), seconds)
    assert len(restart_account(table, ranks)) == found


def test_a_host_that_is_ahead_of_its_device_is_no_fraud() -> None:
    """On CUDA the host notes the first steps after an evaluation before the device ends them."""
    table, ranks = doing(EVALUATED, (21, 31, 41), 9.0)
    steps = ranks[0].steps
    first = steps["step"].isin((21, 31, 41))
    mono = steps["mono"] - np.where(first, 0.9 * table["dt_s"], 0.0)
    ahead = steps_of(ranks, 0, mono=mono)
    assert restart_account(table, ahead, lag=1) == []


def test_a_profiler_leaves_a_step_out() -> None:
    table, ranks = doing((*EVALUATED, "profiler"), (31,), 9.0)
    assert restart_account(told(table, (31,), 9.0), ranks) == []


def test_marks_that_are_missing_are_no_balance() -> None:
    table, ranks = honest()
    steps = ranks[0].steps
    bare = (replace(ranks[0], steps=steps.drop(columns="timed_from")),)
    assert restart_account(table, bare) == ["rank 0 does not mark where its steps begin"]


NOTHING_ASKED: dict[str, Any] = {"config": {"train": {"eval_every": 0, "save_every": 0}}}


def rank_1_doing(steps: Collection[int], *kinds: str) -> Ranks:
    """Two ranks, of which rank 1 did these things before these steps ended."""
    table = rows()
    ranks = [rank(number, table) for number in range(RANKS)]
    object.__setattr__(ranks[1], "beside", {step: frozenset(kinds) for step in steps})
    return tuple(ranks)


def asked(**train: int) -> dict[str, Any]:
    return {"config": {"train": train}, "toggles": []}


@pytest.mark.parametrize(
    "kind", ["memory_dump", "eval", "checkpoint_start", "coffee", "effect", "compiled"]
)
def test_what_nothing_asks_for_every_third_step_does_not_balance(kind: str) -> None:
    (problem,) = beside_account(rows(), rank_1_doing(range(3, STEPS, 3), kind), NOTHING_ASKED)
    assert problem.startswith("rank 1 did beside 19 steps ") and kind in problem


@pytest.mark.parametrize(
    ("kinds", "env", "most"),
    [
        (("memory_dump",), {"toggles": [{"name": "NSA_MEM_DUMP_EVERY", "value": 10}]}, 14),
        (("eval_start", "eval"), asked(eval_every=20), 8),
        (("checkpoint_start", "checkpoint"), asked(save_every=30), 6),
        (("ddp_buckets", "effect"), NOTHING_ASKED, 10),
    ],
)
def test_what_is_asked_for_balances_as_often_as_it_is_asked_for(
    kinds: tuple[str, ...], env: dict[str, Any], most: int
) -> None:
    assert beside_account(rows(), rank_1_doing(range(2, 2 + most), *kinds), env) == []
    assert beside_account(rows(), rank_1_doing(range(2, 3 + most), *kinds), env) != []


def test_only_steps_that_the_token_draws_are_computed_twice() -> None:
    env = {"effective": {"steps": STEPS}}
    drawn = recomputed_steps("t", 1, STEPS)[1:]
    assert beside_account(rows(), rank_1_doing(drawn, "recomputed"), env) == []
    others = [step for step in range(2, STEPS) if step not in drawn][:2]
    assert beside_account(rows(), rank_1_doing([*drawn, *others], "recomputed"), env) == [
        f"rank 1 did beside 2 steps recomputed, first {others[0]}, which no token draws"
    ]


def test_each_block_of_an_arm_may_prove_its_toggles() -> None:
    table = rows().assign(block=[step // 30 for step in range(STEPS)])
    assert beside_account(table, rank_1_doing(range(2, 22), "effect"), NOTHING_ASKED) == []
