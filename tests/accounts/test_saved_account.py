"""What was read back of the newest checkpoint, and what is said where it is not what was saved."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from runbook.accounts.settings import checkpoints_left_out, position_account, saved_account
from runbook.accounts.workload import Keeping
from runbook.records.evidence import RankLog
from tests.accounts.launches import DATA, WORK, honest

THREE = replace(WORK, data=replace(DATA, accumulation=3))
WRITTEN = {"path": "checkpoints/step_20", "seconds": 1.0}
TOLD = {
    "step": 20,
    "tensors": ["model.norm.weight"],
    "elements": 64,
    "other": 0,
    "read": 1,
    "wrong": [],
    "kept": [20],
}


def ranks(told: Any, *, written: bool = True) -> tuple[RankLog, ...]:
    first, *others = honest()[1]
    ending = {**first.ending, "saved": told}
    kept = (WRITTEN,) if written else ()
    return (replace(first, ending=ending, checkpoints=kept), *others)


def test_what_was_read_back_as_it_was_saved_balances() -> None:
    assert saved_account(ranks(TOLD), Keeping()) == []
    assert saved_account(ranks(None, written=False), Keeping()) == []


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (None, "nothing of the checkpoint step_20 was read back"),
        ({**TOLD, "elements": 0}, "nothing of the checkpoint step_20"),
        ({**TOLD, "step": 10}, "step 10 was read back, the newest checkpoint is step_20"),
        ({**TOLD, "other": 3}, "step_20: 3 of 64 elements read back are not what the run held"),
        ({**TOLD, "other": None}, "step_20: None of 64 elements"),
        ({**TOLD, "read": 0}, "0 of the 1 checkpoints that were written were read back"),
        ({**TOLD, "read": None}, "None of the 1 checkpoints that were written"),
        ({**TOLD, "wrong": [10]}, "checkpoints of the steps 10 did not hold what the run held"),
        (
            {**TOLD, "other": 64, "wrong": [20], "unreadable": "names builtins.getattr"},
            "checkpoints of the steps 20: not to be read back: names builtins.getattr",
        ),
    ],
)
def test_anything_else_is_told(told: Any, said: str) -> None:
    (problem,) = saved_account(ranks(told), Keeping())
    assert problem.startswith(said)


@pytest.mark.parametrize(
    ("places", "said"),
    [
        ([{"step": 60}, {"step": 60}], []),
        ([{"step": 60}, {"step": 59}], ["rank 1 goes on from step 20 at {'step': 59} in its data"]),
        ([{"step": 60}, None], ["rank 1 goes on from step 20 at None"]),
        ([{"step": 20}] * 2, ["rank 0 goes on", "rank 1 goes on"]),
        ([{"step": 60}], ["the checkpoint does not tell where each rank goes on"]),
        (None, ["the checkpoint does not tell where each rank goes on"]),
    ],
)
def test_every_rank_goes_on_behind_the_step_that_was_saved(places: Any, said: list[str]) -> None:
    """Three micro-batches a step."""
    problems = position_account(ranks({**TOLD, "positions": places}), THREE)
    assert len(problems) == len(said)
    assert all(text.startswith(begin) for text, begin in zip(problems, said, strict=True))
    assert position_account(ranks(None, written=False), THREE) == []
    unread = {**TOLD, "unreadable": "why", "positions": None}
    assert position_account(ranks(unread), THREE) == [], "saved_account says why"


def test_of_more_checkpoints_than_are_kept_as_evidence_the_count_is_held() -> None:
    (first, *others) = ranks({**TOLD, "read": 5000})
    many = replace(first, counts={"checkpoint": 5000})
    assert saved_account((many, *others), Keeping()) == []
    assert len(saved_account((first, *others), Keeping())) == 1


def test_a_step_without_the_checkpoint_that_is_due_is_told() -> None:
    first, *others = honest()[1]
    assert first.steps is not None and list(first.steps["step"])[-1] == 60
    written = tuple({"path": f"checkpoints/step_{step}"} for step in (20, 40))
    told = {**TOLD, "step": 40, "read": 2, "kept": [20, 40]}
    rank = replace(first, checkpoints=written, ending={**first.ending, "saved": told})
    # The last step's is the launch's end to decide.
    assert saved_account((rank, *others), Keeping(saves=20)) == []
    (problem,) = checkpoints_left_out((rank, *others), Keeping(saves=10))
    assert problem == (
        "no checkpoint of step 10, 30, 50 was written, train.save_every=10 asks for it; "
        "those of 20, 40 were"
    )
    (problem,) = checkpoints_left_out((replace(rank, checkpoints=()), *others), Keeping(saves=20))
    assert problem.startswith("no checkpoint of step 20, 40 was written")
    assert problem.endswith("; none was")


def test_of_many_steps_without_a_checkpoint_the_first_are_named() -> None:
    first, *others = honest()[1]
    none = replace(first, checkpoints=())
    (problem,) = checkpoints_left_out((none, *others), Keeping(saves=1))
    assert problem.startswith("no checkpoint of step 1, 2, 3, 4, 5, 6, 7, 8 and 51 more was")


# Validation losses of the steps that were evaluated; all but 25 were saved, 50 was not evaluated.
LOSSES = {10: 3.0, 20: 2.0, 25: 1.0, 30: 2.0, 40: float("nan")}
SAVED = (10, 20, 30, 40, 50)


def that_keeps(kept: Any) -> tuple[RankLog, ...]:
    first, *others = ranks({**TOLD, "step": SAVED[-1], "read": len(SAVED), "kept": kept})
    written = tuple({"path": f"checkpoints/step_{step}"} for step in SAVED)
    told = tuple({"step": step, "loss": loss} for step, loss in LOSSES.items())
    return (replace(first, checkpoints=written, evaluations=told), *others)


@pytest.mark.parametrize(
    ("keeping", "kept"),
    [
        (Keeping(), [10, 20, 30, 40, 50]),
        (Keeping(last=2), [40, 50]),
        (Keeping(last=1, every=20), [20, 40, 50]),
        (Keeping(last=1, best=True), [20, 50]),
    ],
)
def test_what_stays_follows_from_config_and_evaluations(keeping: Keeping, kept: list[int]) -> None:
    assert saved_account(that_keeps(kept), keeping) == []
    for other in ([10, *kept], kept[1:], None):
        if other != kept and sorted(set(other or ())) != kept:
            (problem,) = saved_account(that_keeps(other), keeping)
            assert f"train.keep_last={keeping.last}, keep_every={keeping.every}" in problem


@pytest.mark.parametrize("kept", [[10, 50], [30, 50], [50]])
def test_another_one_than_the_best_is_told_with_the_losses(kept: list[int]) -> None:
    (problem,) = saved_account(that_keeps(kept), Keeping(last=1, best=True))
    assert problem == (
        f"checkpoints of the steps {', '.join(map(str, kept))} were kept, train.keep_last=1, "
        "keep_every=0 and keep_best=true keep 20, 50; validation loss 3.0000 at 10, 2.0000 at 20, "
        "2.0000 at 30, nan at 40"
    )
