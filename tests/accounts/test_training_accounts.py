"""Steps that are watched, schedules and sums: each at the limit of what sources may differ by."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from nsa.contract.digests import recomputed_steps, watched_steps
from runbook.accounts.gradients import (
    gradient_tolerance,
    rate_account,
    shadow_account,
    warmup_account,
)
from runbook.accounts.tables import summed_account
from tests.accounts.launches import STEPS, WORK, changed, ending_of, honest, rows
from tests.factory.told import recomputed, shadow

PEAK, RAMP = 1.0, 4
ENV: dict[str, Any] = {
    "config": {"train": {"lr": PEAK, "warmup_steps": RAMP, "lr_schedule": "cosine"}},
    "effective": {"schedule_steps": 24},
}


def rates(steps: int = 40) -> pd.DataFrame:
    """A ramp over 4 steps, half a cosine to a tenth of the peak at step 24, that tenth after it."""
    step = np.arange(1, steps + 1)
    fall = 0.1 + 0.9 * (1 + np.cos(math.pi * np.minimum(1, (step - 4) / 20))) / 2
    return pd.DataFrame({"step": step, "lr": np.where(step <= 4, step / 4, fall)})


@pytest.mark.parametrize("step", [1, 4, 5, 14, 24, 40])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_rate_follows_from_the_schedule_up_to_its_rounding(step: int, sign: int) -> None:
    table = rates()
    assert rate_account(table, ENV) == []
    shape = {"train": {**ENV["config"]["train"], "lr_schedule": "constant"}}
    flat = table.assign(lr=table["lr"].where(table["step"] <= RAMP, PEAK))
    assert rate_account(flat, ENV | {"config": shape}) == []
    assert "lr of step 5 is 1, planned is 0.9" in rate_account(flat, ENV)[0]
    for unknown in ({}, {"train": {**ENV["config"]["train"], "lr": None}}):
        assert "does not say" in rate_account(table, ENV | {"config": unknown})[0]
    near = table.assign(lr=table["lr"] + sign * 0.9e-6 * (table["step"] == step))
    assert rate_account(near, ENV) == []
    off = table.assign(lr=table["lr"] + sign * 1.1e-6 * (table["step"] >= step))
    (text,) = rate_account(off, ENV)
    assert text.startswith(f"lr of step {step} is ")


def test_a_schedule_that_ends_with_its_ramp_stays_at_the_tenth() -> None:
    table = pd.DataFrame({"step": [4, 5, 6], "lr": [1.0, 0.1, 0.1]})
    assert rate_account(table, ENV | {"effective": {"schedule_steps": 4}}) == []
    assert rate_account(table.drop(columns="lr"), ENV) == ["the CSV has no column lr"]
    odd = table.assign(lr=[1.0, math.nan, 0.1])
    assert "lr of step 5 is nan, planned is " in rate_account(odd, ENV)[0]


def test_without_blocks_the_whole_file_has_one_warm_up() -> None:
    table = rates().assign(warmup=lambda rows: rows["step"] <= 2)
    assert warmup_account(table, ENV | {"arms": {"warmup_steps": 2}}) == []
    assert warmup_account(table, ENV | {"arms": {"warmup_steps": 4}}) == [
        "2 steps, first 3, are marked as warm-up or not against the schedule, whose blocks begin "
        "with 4 such steps"
    ]
    assert warmup_account(table, ENV | {"arms": {}}) == [
        "2 steps, first 1, are marked as warm-up or not against the schedule, whose blocks begin "
        "with 0 such steps"
    ]


@pytest.mark.parametrize("name", ["block", "arm"])
def test_the_warm_up_of_a_block_begins_with_its_arm(name: str) -> None:
    """One of both columns is enough."""
    table = rates().assign(**{name: lambda rows: rows["step"] // 21})
    table["warmup"] = table["step"].isin([1, 21])
    assert warmup_account(table, ENV | {"arms": {"warmup_steps": 1}}) == []
    assert len(warmup_account(table.drop(columns=name), ENV | {"arms": {"warmup_steps": 1}})) == 1


def _summed(table: pd.DataFrame, rank: int) -> dict[str, Any]:
    """What a rank sums where it computes: of two, one is as much above their mean as the other."""
    weights, apart = 1 + table["step"].to_numpy() % 3, 0.25 * (1 - 2 * rank)
    loss = ((table["loss"].to_numpy() + apart) * weights).sum()
    return {"steps": len(table), "loss": loss, "grad_norm": (table["grad_norm"] * weights).sum()}


def _moved(name: str, *changes: tuple[int, float]) -> pd.DataFrame:
    table, _ = honest()
    for step, by in changes:
        table.loc[table["step"] == step, name] += by
    return table


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (_moved("loss"), ""),
        (_moved("loss", (37, 1e-4)), "loss of 60 steps"),
        (_moved("grad_norm", (37, -1e-4)), "grad_norm of 60 steps"),
        # Two neighbors that change places, and what one loses and the next one gets.
        (_moved("loss", (37, 0.01), (38, -0.01)), "loss of 60 steps"),
        # Another row says that a number is not finite.
        (_moved("loss", (37, math.nan)), ""),
        (_moved("grad_norm", (37, math.inf)), ""),
    ],
)
def test_one_step_that_tells_another_number_is_seen_in_the_sums(
    table: pd.DataFrame, says: str
) -> None:
    right, ranks = honest()
    for number in range(len(ranks)):
        ranks = ending_of(ranks, number, summed=_summed(right, number))
    found = summed_account(table, ranks)
    assert [text[: len(says)] for text in found] == ([says] if says else [])


def test_sums_that_no_rank_or_one_rank_tells() -> None:
    table, ranks = honest()
    assert summed_account(_moved("loss", (37, 1.0)), ranks) == [], "an earlier run"
    told = ending_of(ranks, 0, summed=_summed(table, 0))
    one = ending_of(told, 1, summed={"steps": len(table), "loss": None, "grad_norm": 1.0})
    assert len(summed_account(table, one)) == 2
    # Of steps that the CSV has not: `copy_account` says so.
    short = ending_of(told, 1, summed={"steps": 3, "loss": 1.0, "grad_norm": 1.0})
    assert summed_account(table, short) == []
    assert summed_account(table, told) == ["rank 1 does not sum what it computed"]


ALONE = honest()[1][:1]


def test_the_steps_that_the_token_draws_are_watched_as_far_as_the_launch_went() -> None:
    wanted, twice = watched_steps("t", 1, STEPS), recomputed_steps("t", 1, STEPS)
    steps_until_30 = changed(ALONE, 0, steps=ALONE[0].steps.iloc[:30])
    (text, again) = shadow_account(steps_until_30, WORK)
    assert text.endswith(f"not {[s for s in wanted if s <= 30]}")
    assert again.endswith(f"not {[s for s in twice if s <= 30]}")
    assert len(shadow_account(changed(ALONE, 0, tokens=frozenset({"u"})), WORK)) == 2
    assert len(shadow_account(changed(ALONE, 0, tokens=frozenset()), WORK)) == 2


def test_a_resumed_launch_watches_its_own_first_steps() -> None:
    later = changed(ALONE, 0, first_step=21)
    assert len(shadow_account(later, WORK)) == 2
    told = shadow(watched_steps("t", 21, STEPS))
    twice = recomputed(recomputed_steps("t", 21, STEPS), rows())
    assert shadow_account(ending_of(later, 0, shadow=told, recomputed=twice), WORK) == []


def test_the_first_and_the_last_pair_are_watched_and_others_by_the_token() -> None:
    for last in (1, 2, 3, 5, 200):
        steps = watched_steps("ab", 1, last)
        assert set(steps) >= {1, min(2, last), max(1, last - 1), last}
        assert list(steps) == sorted(set(steps)) and (steps[0], steps[-1]) == (1, last)
    assert len({watched_steps(str(token), 1, 200) for token in range(20)}) == 20


def test_a_gradient_in_float32_is_off_by_its_sums_alone() -> None:
    narrow = replace(WORK, wire="fp32", dtype="fp32", device="cpu")
    assert gradient_tolerance(narrow) == 2e-5
    two = gradient_tolerance(replace(narrow, wire="bf16"))
    assert two == pytest.approx(4 * 2**-8 * 2**0.5)
    assert gradient_tolerance(replace(narrow, wire=None)) == two
    assert gradient_tolerance(replace(narrow, wire="bf16", nproc=8)) == pytest.approx(2 * two)
