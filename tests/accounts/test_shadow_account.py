"""What the watched updates may be off by, and which steps have to be watched."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from nsa.contract.digests import recomputed_steps, watched_steps
from runbook.accounts.optimizer import gradient_tolerance, shadow_account
from tests.accounts.launches import (
    STEPS,
    WORK,
    Ranks,
    changed,
    ending_of,
    honest,
    rows,
    shadow_of,
)
from tests.factory.told import recomputed, shadow

ALONE = honest()[1][:1]


def test_the_steps_that_the_token_draws_are_watched_as_far_as_the_launch_went() -> None:
    wanted = list(watched_steps("t", 1, STEPS))
    (text,) = shadow_account(shadow_of(ALONE, steps=wanted[:2]), WORK)
    assert text == f"rank 0: the optimizer was watched in steps [1, 2], not {wanted}"
    short, twice = _first_steps(ALONE, 30), list(recomputed_steps("t", 1, STEPS))
    (text, again) = shadow_account(short, WORK)
    assert text.endswith(f"not {[s for s in wanted if s <= 30]}")
    assert again.endswith(f"not {[s for s in twice if s <= 30]}")
    assert len(shadow_account(changed(ALONE, 0, tokens=frozenset({"u"})), WORK)) == 2
    assert len(shadow_account(changed(ALONE, 0, tokens=frozenset()), WORK)) == 2
    (text, _) = shadow_account(ALONE, replace(WORK, steps=None))
    assert "does not say how many steps" in text


def test_a_resumed_launch_watches_its_own_first_steps() -> None:
    later = changed(ALONE, 0, first_step=21)
    assert len(shadow_account(later, WORK)) == 2
    told = shadow(watched_steps("t", 21, STEPS))
    twice = recomputed(recomputed_steps("t", 21, STEPS), rows())
    assert shadow_account(ending_of(later, 0, shadow=told, recomputed=twice), WORK) == []


def _first_steps(ranks: Ranks, count: int) -> Ranks:
    steps = ranks[0].steps
    return changed(ranks, 0, steps=steps.iloc[:count])


def test_the_first_and_the_last_pair_are_watched_and_others_by_the_token() -> None:
    for last in (1, 2, 3, 5, 200):
        steps = watched_steps("ab", 1, last)
        assert set(steps) >= {1, min(2, last), max(1, last - 1), last}
        assert list(steps) == sorted(set(steps)) and (steps[0], steps[-1]) == (1, last)
    assert len({watched_steps(str(token), 1, 200) for token in range(20)}) == 20


def again(**changes: Any) -> list[str]:
    """Problems of a launch whose rank 0 tells this of what it computed twice."""
    _, ranks = honest()
    told = {**ranks[0].ending["recomputed"], **changes}
    return shadow_account(ending_of(ranks, 0, recomputed=told), WORK)


def test_a_gradient_in_float32_is_off_by_its_sums_alone() -> None:
    narrow = replace(WORK, wire="fp32", dtype="fp32", device="cpu")
    assert gradient_tolerance(narrow) == 2e-5
    two = gradient_tolerance(replace(narrow, wire="bf16"))
    assert two == pytest.approx(4 * 2**-8 * 2**0.5)
    assert gradient_tolerance(replace(narrow, wire=None)) == two
    assert gradient_tolerance(replace(narrow, wire="bf16", nproc=8)) == pytest.approx(2 * two)


def between(*gaps: float | None) -> list[str]:
    """Problems of a launch whose ranks are so far from their mean in the same micro-batch."""
    (rank,) = ALONE
    twice = rank.ending["recomputed"]
    ranks = [
        replace(rank, rank=n, ending={**rank.ending, "recomputed": {**twice, "ranks": gap}})
        for n, gap in enumerate(gaps)
    ]
    return shadow_account(ranks, replace(WORK, nproc=len(gaps)))


def test_ranks_make_the_same_gradient_of_the_same_micro_batch() -> None:
    assert between(0.0, 0.031) == between(0.0) == []
    assert len(between(0.0, 0.032)) == 1
    assert between(0.333, 0.3331) == [
        "ranks make different gradients of one micro-batch: rank 0 and rank 1 off by 0.3331 of "
        "the ranks' mean, allowed 0.031"
    ]
    (text,) = between(0.1, 0.1, 0.3, 0.1)
    assert "rank 2 off by 0.3 of" in text


@pytest.mark.parametrize("gap", [math.nan, math.inf, -1.0, None])
def test_a_rank_that_is_held_against_nobody_is_said(gap: float | None) -> None:
    (text,) = between(0.0, gap)
    assert "rank 1" in text and f"off by {gap}" in text


def test_what_was_not_computed_twice_or_in_other_steps_is_said() -> None:
    steps = list(recomputed_steps("t", 1, STEPS))
    (text,) = again(steps=steps[1:])
    assert text == f"rank 0: gradients were computed again in steps {steps[1:]}, not {steps}"
