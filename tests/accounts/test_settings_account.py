"""The checkpoints that a launch kept, against those that it was to keep."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from runbook.accounts import Keeping
from runbook.accounts.tables import checkpoints_left_out, saved_account
from runbook.records.evidence import RankLog
from tests.accounts.launches import honest

TOLD = {
    "step": 20,
    "tensors": ["model.norm.weight"],
    "elements": 64,
    "other": 0,
    "read": 1,
    "wrong": [],
    "kept": [20],
}


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
    none = replace(rank, checkpoints=())
    (problem,) = checkpoints_left_out((none, *others), Keeping(saves=1))
    assert problem.startswith("no checkpoint of step 1, 2, 3, 4, 5, 6, 7, 8 and 51 more was")
    assert problem.endswith("; none was")


# Validation losses of the steps that were evaluated; all but 25 were saved, 50 was not evaluated.
LOSSES = {10: 3.0, 20: 2.0, 25: 1.0, 30: 2.0, 40: float("nan")}
SAVED = (10, 20, 30, 40, 50)


def that_keeps(kept: Any) -> tuple[RankLog, ...]:
    first, *others = honest()[1]
    saved = {**TOLD, "step": SAVED[-1], "read": len(SAVED), "kept": kept}
    written = tuple({"path": f"checkpoints/step_{step}"} for step in SAVED)
    told = tuple({"step": step, "loss": loss} for step, loss in LOSSES.items())
    ending = {**first.ending, "saved": saved}
    return (replace(first, ending=ending, checkpoints=written, evaluations=told), *others)


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


def test_another_one_than_the_best_is_told_with_the_losses() -> None:
    (problem,) = saved_account(that_keeps([30, 50]), Keeping(last=1, best=True))
    assert problem == (
        "checkpoints of the steps 30, 50 were kept, train.keep_last=1, keep_every=0 and "
        "keep_best=true keep 20, 50; validation loss 3.0000 at 10, 2.0000 at 20, 2.0000 at 30, "
        "nan at 40"
    )
