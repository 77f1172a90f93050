"""Data: which tokens each rank read and embedded, and whether another read the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from runbook.accounts import data
from runbook.records.evidence import RankLog
from tests.accounts.launches import (
    PER_RANK,
    TEXT,
    WORK,
    all_accounts,
    changed,
    ending_of,
    honest,
    proof_of,
    steps_of,
)


def test_a_document_may_be_read_again_but_not_at_once() -> None:
    table, ranks = honest()
    digests = [f"{step % 20:016x}" for step in table["step"]]
    again = steps_of(ranks, 0, data=digests)
    assert all_accounts(table, again, replace(WORK, data=None)) == []
    stuck = steps_of(ranks, 0, data=["1", *["1"], *digests[2:]])
    assert "what it read before" in "; ".join(all_accounts(table, stuck, replace(WORK, data=None)))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "rank 1 does not turn the tokens of its first documents back"),
        ({**TEXT, "decoded": None}, "rank 1 does not turn"),
        ({**TEXT, "bytes": 0}, "rank 1 does not turn"),
        (
            {**TEXT, "decoded": "5f", "apart": 17},
            "rank 1 trains on another text than its documents have: tokens turned back differ from "
            "byte 17 of 129 (2 documents)",
        ),
    ],
)
def test_the_text_of_documents_is_what_their_tokens_tell(text: Any, says: str) -> None:
    _, ranks = honest()
    read = proof_of(ranks, 1, text=text)
    (problem,) = data.data_account(read, replace(WORK, data=None))
    assert problem.startswith(says)
    assert data.data_account(read, WORK) == []
    resumed = changed(read, 1, first_step=9)
    assert data.data_account(resumed, replace(WORK, data=None)) == []


def shared(ranks: Sequence[RankLog]) -> list[str]:
    """Problems of the data account, but for rows that are none of the data's."""
    found = data.data_account(ranks, WORK)
    return [text for text in found if "other rows than" not in text]


def test_tokens_are_counted_on_every_rank_whatever_another_says() -> None:
    table, ranks = honest()
    seen = np.where(table["step"] >= 30, PER_RANK + 1, PER_RANK)
    ranks = steps_of(steps_of(ranks, 0, embedded=np.where(seen > PER_RANK, np.nan, seen)), 1,
                     embedded=seen)  # fmt: skip
    assert data.token_account(table, proof_of(ranks, 1, positions=127), WORK) == [
        "rank 0 does not say how many tokens it embedded",
        "rank 1 embedded 129 tokens in step 30, not 128",
        "rank 1 takes the loss at 127 positions of 128 in a pass",
    ]
    _, ranks = honest()
    assert data.token_account(table, ending_of(ranks, 1, embedded_sum=8), WORK) == [
        "rank 1 embeds other tokens than it fetched: 8 for 7"
    ]
    nothing = ending_of(ranks, 1, fetched_sum=None, embedded_sum=None)
    assert len(data.token_account(table, nothing, WORK)) == 1
    assert data.token_account(table.drop(columns="tokens"), ranks, WORK) == []
    for more in (1, -1):
        other = table["tokens"] + more * (table["step"] == 60)
        assert data.token_account(table.assign(tokens=other), ranks, WORK) == [
            "column tokens is not what the ranks embed together"
        ]


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


def test_of_many_ranks_each_is_held_against_the_first_that_read_the_same() -> None:
    _, ranks = honest()
    many = [replace(ranks[0], rank=number) for number in range(64)]
    found = shared(many)
    assert len(found) == 63, "not each against each"
    assert found[0] == "ranks 0 and 1 read the same data in 60 steps, first in step 1"
    assert found[-1] == "ranks 0 and 63 read the same data in 60 steps, first in step 1"


def test_digests_add_up_in_64_bits() -> None:
    """A rank with a digest of 2^63 and one without were added as floats, to another sum."""
    _, ranks = honest()
    high = steps_of(ranks, 0, data="f" * 16)
    low = steps_of(high, 1, data="3")
    total = data.union_of_data(low)
    assert total is not None and set(total) == {2}
    assert data.union_of_data(steps_of(low, 0, data=None)) is None
    assert data.union_of_data(changed(low, 1, steps=None)) is None
    assert data.union_of_data(()) is None
