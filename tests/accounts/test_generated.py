"""What generated data are follows from their definition: the harness makes the same rows itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nsa.data.source import GeneratedSource
from nsa.settings import Share
from nsa.witness.accounts import batch_digest
from runbook.accounts.data import data_account
from runbook.accounts.workload import GeneratedData, Workload
from runbook.records.evidence import RankLog
from tests.accounts.launches import DATA, WORK, Ranks, changed, honest, steps_of

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


def other_rows(ranks: Ranks, kind: GeneratedData) -> Ranks:
    """Rank 1 tells of the rows of other data."""
    return steps_of(ranks, 1, data=[kind.of_step(1, step) for step in range(1, 61)])


@pytest.mark.parametrize("changes", [{"seed": 2}, {"vocab_size": 128}, {"rows": 2}])
def test_rows_of_other_data_are_seen(changes: dict[str, Any]) -> None:
    _, ranks = honest()
    assert data_account(ranks, WORK) == []
    (text,) = data_account(other_rows(ranks, replace(DATA, **changes)), WORK)
    assert text == (
        "rank 1 reads in step 1 other rows than synthetic data of seed 1 have "
        "(60 of 60 steps looked at)"
    )


def test_one_step_of_other_rows_is_seen_though_no_other_step_reads_them() -> None:
    _, ranks = honest()
    told = ranks[0].steps["data"].where(ranks[0].steps["step"] != 33, "ff")
    (text,) = data_account(steps_of(ranks, 0, data=told), WORK)
    assert "in step 33 other rows" in text and "(1 of 60 steps" in text


EVALUATING = replace(WORK, eval_every=20, eval_batches=3)


def evaluated(*told: Any) -> Ranks:
    ranks = changed(honest()[1], 0, evaluations=tuple({"data": one} for one in told))
    good = {"data": DATA.held_out(1, 3)}
    return changed(ranks, 1, evaluations=(good,) * 3)


def problems(ranks: tuple[RankLog, ...], work: Workload = EVALUATING) -> list[str]:
    return data_account(ranks, work)


def test_evaluations_read_what_is_held_out() -> None:
    good = DATA.held_out(0, 3)
    assert problems(evaluated(good, good)) == []
    assert problems(evaluated(good, DATA.of_step(0, 1))) == [
        "rank 0 evaluates on other data than the held-out rows of seed 1 (1 of 2)"
    ]
    assert problems(evaluated(good, None)) == ["rank 0 does not say on which data it evaluated"]
    assert problems(evaluated()) == ["rank 0 does not say on which data it evaluated"]
    assert problems(evaluated(), replace(EVALUATING, eval_every=60)) == []
    assert (
        "batches in an evaluation"
        in problems(evaluated(good), replace(EVALUATING, eval_batches=1 << 40))[0]
    )


def test_documents_that_are_held_out_are_the_same_each_time() -> None:
    documents = replace(EVALUATING, data=None)
    assert problems(evaluated("a", "a"), documents) == []
    assert problems(evaluated("a", "b"), documents) == [
        "rank 0 evaluates on other data than those of the first (1 of 2)"
    ]
