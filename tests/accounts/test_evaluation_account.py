"""What an evaluation tells has to follow from its batches, one of which is computed again."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest

from nsa.contract.digests import drawn_batch
from runbook.accounts.tables import evaluation_account, evaluations_left_out
from tests.accounts.launches import PER_RANK, WORK, Ranks, changed, honest

BATCHES, EVERY = 3, 20
EVALUATING = replace(WORK, eval_every=EVERY, eval_batches=BATCHES)
VAL = pd.DataFrame({"step": [20, 40, 60], "loss": [5.15, 4.15, 3.15]})


def told(rank: int, after: int, **other: Any) -> dict[str, Any]:
    """Rank 0 tells 0.1 nats less than rank 1; batches differ by 0.1."""
    mean = 6.15 - after / 20
    losses = [mean + 0.1 * (rank - 0.5) + 0.1 * (batch - 1) for batch in range(BATCHES)]
    drawn = drawn_batch("t", rank, after, BATCHES)
    again = {"batch": drawn, "loss": losses[drawn] + 1e-4}
    embedded = BATCHES * PER_RANK
    return {
        "step": after, "loss": mean, "losses": losses, "again": again, "embedded": embedded, **other
    }  # fmt: skip


def ranks(**other: Any) -> Ranks:
    """Both evaluate three times; `other` is what rank 1 tells of the second."""
    found = honest()[1]
    for rank in (0, 1):
        own = [
            told(rank, step, **(other if (rank, step) == (1, 40) else {})) for step in VAL["step"]
        ]
        found = changed(found, rank, evaluations=tuple(own))
    return found


def test_honest_evaluations_balance_and_no_evaluation_does() -> None:
    assert evaluation_account(VAL, ranks(), EVALUATING) == []
    assert evaluation_account(None, honest()[1], WORK) == []
    assert evaluation_account(VAL.iloc[:0], honest()[1], WORK) == []


@pytest.mark.parametrize(
    ("left", "wanted"),
    [
        ((20, 60), "left out 1 of 2 .* that train.eval_every=20 asks for, first after .* 40"),
        ((60,), "left out 2 of 2 evaluations .*, first after step 20"),
        ((20, 40), ""),
    ],
)
def test_an_evaluation_that_is_due_and_not_made_is_seen(left: tuple[int, ...], wanted: str) -> None:
    """Of the last step the launch's end decides."""
    found = honest()[1]
    for rank in (0, 1):
        found = changed(found, rank, evaluations=tuple(told(rank, step) for step in left))
    problems = evaluations_left_out(found, EVALUATING)
    assert len(problems) == (2 if wanted else 0)
    assert all(re.search(wanted, text) for text in problems), problems


ONE = told(1, 40)


@pytest.mark.parametrize(
    ("other", "wanted"),
    [
        ({"loss": 0.9 * ONE["loss"]}, "rank 1 tells a validation loss of 3.735 after step 40"),
        ({"loss": None}, "a validation loss of None"),
        (
            {"losses": [0.9 * loss for loss in ONE["losses"]]},
            "rank 1's evaluation after step 40 tells a loss of",
        ),
        ({"losses": ONE["losses"][:2]}, "tells the losses of 2 batches, planned are 3"),
        ({"losses": None}, "tells the losses of 0 batches"),
        ({"embedded": BATCHES * PER_RANK // 2}, "embedded 192 tokens, not 384"),
        ({"embedded": None}, "embedded None tokens"),
        ({"again": None}, "computed batch None a second time, drawn is"),
        ({"again": {**ONE["again"], "batch": (ONE["again"]["batch"] + 1) % 3}}, "drawn is"),
        ({"again": {**ONE["again"], "loss": ONE["again"]["loss"] + 0.01}}, "computed again"),
        ({"again": {**ONE["again"], "loss": None}}, "computed again None"),
        ({"losses": [1e308] * 3}, "computed again"),
    ],
)
def test_an_evaluation_that_does_not_balance_is_seen(other: dict[str, Any], wanted: str) -> None:
    problems = evaluation_account(VAL, ranks(**other), EVALUATING)
    assert any(wanted in text for text in problems), problems


def test_on_a_cpu_a_batch_gives_its_loss_again_to_four_digits() -> None:
    """A loss in bf16 was off by 5e-4 to 2e-2 nats; computed again in its own type by nothing."""
    for off, device, count in ((5e-4, "cpu", 1), (1.9e-4, "cpu", 0), (1.9e-3, "cuda", 0)):
        losses = ONE["losses"]
        again = {**ONE["again"], "loss": losses[ONE["again"]["batch"]] + off}
        work = replace(EVALUATING, device=device)
        assert len(evaluation_account(VAL, ranks(again=again), work)) == count


def test_val_csv_tells_what_the_heartbeats_tell() -> None:
    def problems(val: pd.DataFrame | None) -> list[str]:
        return evaluation_account(val, ranks(), EVALUATING)

    assert problems(VAL.assign(loss=0.9 * VAL["loss"]))[0].startswith("val.csv has a loss of 4.635")
    assert problems(VAL.iloc[:2]) == ["val.csv has 2 evaluations, rank 0 tells of 3"]
    assert problems(None) == ["val.csv has 0 evaluations, rank 0 tells of 3"]


def test_ranks_evaluate_after_the_same_steps() -> None:
    problems = evaluation_account(VAL, ranks(step=41), EVALUATING)
    assert "the ranks tell evaluations after different steps" in problems
