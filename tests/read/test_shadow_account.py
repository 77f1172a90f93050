"""What the watched updates may be off by, and which steps have to be watched."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from nsa.contract import watched_steps
from runbook.read.shadow_account import shadow_account
from tests.read.launches import STEPS, WORK, Ranks, changed, ending_of, honest, shadow, shadow_of

ALONE = honest()[1][:1]


@pytest.mark.parametrize(
    ("name", "limit"),
    [("weight", 32), ("first_moment", 32), ("second_moment", 32), ("norm", 1e-2), ("rate", 1e-6)],
)
def test_each_gap_has_its_limit(name: str, limit: float) -> None:
    assert shadow_account(shadow_of(ALONE, **{name: limit}), WORK) == []
    for gap in (limit * 1.01, -limit, math.nan, None):
        (text,) = shadow_account(shadow_of(ALONE, **{name: gap}), WORK)
        assert f"off by {gap}" in text


def test_nothing_may_change_between_two_steps() -> None:
    for jumps in (1, None):
        (text,) = shadow_account(shadow_of(ALONE, jumps=jumps), WORK)
        assert "change between two steps" in text


def test_the_steps_that_the_token_draws_are_watched_as_far_as_the_launch_went() -> None:
    wanted = list(watched_steps("t", 1, STEPS))
    (text,) = shadow_account(shadow_of(ALONE, steps=wanted[:2]), WORK)
    assert text == f"rank 0: the optimizer was watched in steps [1, 2], not {wanted}"
    short = _first_steps(ALONE, 30)
    (text,) = shadow_account(short, WORK)
    assert text.endswith(f"not {[s for s in wanted if s <= 30]}")
    assert len(shadow_account(changed(ALONE, 0, tokens=frozenset({"u"})), WORK)) == 1
    assert len(shadow_account(changed(ALONE, 0, tokens=frozenset()), WORK)) == 1
    (text,) = shadow_account(ALONE, replace(WORK, steps=None))
    assert "does not say how many steps" in text


def test_a_resumed_launch_watches_its_own_first_steps() -> None:
    later = changed(ALONE, 0, first_step=21)
    assert len(shadow_account(later, WORK)) == 1
    told = shadow(watched_steps("t", 21, STEPS))
    assert shadow_account(ending_of(later, 0, shadow=told), WORK) == []


def test_every_rank_has_to_tell() -> None:
    (text,) = shadow_account(ending_of(honest()[1], 1, shadow=None), WORK)
    assert text == "rank 1: the optimizer's updates were held against nothing"


def _first_steps(ranks: Ranks, count: int) -> Ranks:
    steps = ranks[0].steps
    assert steps is not None
    return changed(ranks, 0, steps=steps.iloc[:count])


@pytest.mark.parametrize("last", [1, 2, 3, 5, 200])
def test_the_first_and_the_last_pair_are_always_watched(last: int) -> None:
    steps = watched_steps("ab", 1, last)
    assert set(steps) >= {1, min(2, last), max(1, last - 1), last}
    assert list(steps) == sorted(set(steps))
    assert min(steps) == 1
    assert max(steps) == last


def test_another_token_draws_other_steps() -> None:
    drawn = {watched_steps(str(token), 1, 200) for token in range(20)}
    assert len(drawn) == 20
