"""Data: which tokens each rank read and embedded, and whether another read the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from nsa.contract.digests import recomputed_steps
from nsa.data import GeneratedSource
from nsa.settings import Share
from nsa.witness.witness import batch_digest
from runbook.accounts import GeneratedData, data
from runbook.accounts.data import data_account, held_out_account
from runbook.records.evidence import RankLog
from tests.accounts.launches import DATA, WORK, Ranks, all_accounts, changed, honest, steps_of


def test_a_document_may_be_read_again_but_not_at_once() -> None:
    table, ranks = honest()
    digests = [f"{step % 20:016x}" for step in table["step"]]
    again = steps_of(ranks, 0, data=digests)
    assert all_accounts(table, again, replace(WORK, data=None)) == []
    stuck = steps_of(ranks, 0, data=["1", *["1"], *digests[2:]])
    assert "what it read before" in "; ".join(all_accounts(table, stuck, replace(WORK, data=None)))


def shared(ranks: Sequence[RankLog]) -> list[str]:
    """Problems of the data account, but for rows that are none of the data's."""
    found = data.data_account(ranks, WORK)
    return [text for text in found if "other rows than" not in text]


def test_the_same_batch_of_two_ranks_in_one_step_and_in_another() -> None:
    table, ranks = honest()
    first, second = (rank.steps["data"] for rank in ranks)  # type: ignore[index]
    same = second.where(~table["step"].isin([7, 9]), first)
    assert shared(steps_of(ranks, 1, data=same)) == [
        "ranks 0 and 1 read the same data in 2 steps, first in step 7"
    ]
    moved = second.where(table["step"] != 20, first[29])
    assert shared(steps_of(ranks, 1, data=moved)) == [
        "rank 1 reads in step 20 what rank 0 reads in another (1 steps)"
    ]
    silent = changed(steps_of(ranks, 1, data=["1"] * len(table)), 0, steps=None)
    assert shared(silent) == [
        "rank 0 does not say which data it read",
        "rank 1 reads in step 2 what it read before",
    ]
    mute = changed(changed(ranks, 0, steps=None), 1, steps=None)
    assert shared(mute) == [f"rank {rank} does not say which data it read" for rank in (0, 1)]


def test_of_many_ranks_each_is_held_against_the_first_that_read_the_same() -> None:
    _, ranks = honest()
    found = shared([replace(ranks[0], rank=number) for number in range(64)])
    assert len(found) == 63, "not each against each"
    assert found[-1] == "ranks 0 and 63 read the same data in 60 steps, first in step 1"


TWO = GeneratedData(
    kind="synthetic", seed=1337, vocab_size=256, seq_len=96, nproc=2, rows=3, accumulation=2
)


def source(data: GeneratedData, rank: int) -> GeneratedSource:
    share = Share(
        seq_len=data.seq_len, batch_size=data.rows, rank=rank, world_size=data.nproc, seed=data.seed
    )
    return GeneratedSource(data.kind, data.vocab_size, share)


def digest(batches: Any) -> str:
    return f"{sum(batch_digest(tokens) for tokens in batches) % 2**64:016x}"


@pytest.mark.parametrize("changes", [{}, {"kind": "markov"}, {"vocab_size": 50257, "seed": 0}])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_trainers_rows_are_those_of_the_definition(changes: dict[str, Any], rank: int) -> None:
    data = replace(TWO, **changes)
    given = source(data, rank)
    for step in (1, 2, 3):
        assert data.of_step(rank, step) == digest(given.fetch().tokens for _ in range(2))
    assert data.held_out(rank, 4) == digest(given.validation(4))


def test_all_of_few_steps_are_looked_at_and_some_of_many_that_nobody_knows_before() -> None:
    assert TWO.drawn("t", range(1, 80)) == list(range(1, 80))
    many = range(1, 50_001)
    drawn = TWO.drawn("t", many)
    assert len(drawn) == len(set(drawn)) == 1024 // 12
    assert drawn == TWO.drawn("t", many) != TWO.drawn("u", many)
    assert len(replace(TWO, nproc=4096).drawn("t", many)) == 4


@pytest.mark.parametrize("changes", [{"seed": 2}, {"rows": 2}])
def test_rows_of_other_data_are_seen(changes: dict[str, Any]) -> None:
    _, ranks = honest()
    other = replace(DATA, **changes)
    told = [other.of_step(1, step) for step in range(1, 61)]
    (text,) = data_account(steps_of(ranks, 1, data=told), WORK)
    assert text == (
        "rank 1 reads in step 1 other rows than synthetic data of seed 1 have "
        "(60 of 60 steps looked at)"
    )


EVALUATING = replace(WORK, eval_every=20, eval_batches=3)


def evaluated(*told: Any) -> Ranks:
    ranks = changed(honest()[1], 0, evaluations=tuple({"data": one} for one in told))
    good = {"data": DATA.held_out(1, 3)}
    return changed(ranks, 1, evaluations=(good,) * 3)


def test_evaluations_read_what_is_held_out() -> None:
    good, silent = DATA.held_out(0, 3), ["rank 0 does not say on which data it evaluated"]
    assert held_out_account(evaluated(good, good), EVALUATING) == []
    assert held_out_account(evaluated(good, DATA.of_step(0, 1)), EVALUATING) == [
        "rank 0 evaluates on other data than the held-out rows of seed 1 (1 of 2)"
    ]
    assert held_out_account(evaluated(good, None), EVALUATING) == silent
    assert held_out_account(evaluated(), EVALUATING) == silent
    assert held_out_account(evaluated(), replace(EVALUATING, eval_every=60)) == []
    endless = replace(EVALUATING, eval_batches=1 << 40)
    assert "batches in an evaluation" in held_out_account(evaluated(good), endless)[0]
    # Of documents: the same each time.
    documents = replace(EVALUATING, data=None)
    assert held_out_account(evaluated("a", "a"), documents) == []
    assert held_out_account(evaluated("a", "b"), documents) == [
        "rank 0 evaluates on other data than those of the first (1 of 2)"
    ]


def test_the_chance_to_meet_one_step_in_a_hundred() -> None:
    """A pair begins anywhere but at the last step, and meets the defect in one of its two steps."""
    drawn = [recomputed_steps(str(n), 1, 1200, profiled=False) for n in range(4000)]
    wanted = 1 - (1 - 2 * 12 / 1199) ** 5
    met = sum(any(step % 100 == 98 for step in steps) for steps in drawn)
    assert met / 4000 == pytest.approx(wanted, abs=4 * (wanted * (1 - wanted) / 4000) ** 0.5)
    assert all(steps[0] == 1 for steps in drawn)
