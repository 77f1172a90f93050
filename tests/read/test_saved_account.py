"""What was read back of the newest checkpoint, and what is said where it is not what was saved."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from runbook.read.saved_account import saved_account
from runbook.records.evidence import RankLog
from tests.read.launches import honest

WRITTEN = {"path": "checkpoints/step_20", "seconds": 1.0}
TOLD = {"step": 20, "tensors": ["model.norm.weight"], "elements": 64, "other": 0}


def ranks(told: Any, *, written: bool = True) -> tuple[RankLog, ...]:
    first, *others = honest()[1]
    ending = {**first.ending, "saved": told}
    kept = (WRITTEN,) if written else ()
    return (replace(first, ending=ending, checkpoints=kept), *others)


def test_what_was_read_back_as_it_was_saved_balances() -> None:
    assert saved_account(ranks(TOLD)) == []
    assert saved_account(ranks(None, written=False)) == []


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (None, "nothing of the checkpoint step_20 was read back"),
        ({**TOLD, "elements": 0}, "nothing of the checkpoint step_20"),
        ({**TOLD, "step": 10}, "step 10 was read back, the newest checkpoint is step_20"),
        ({**TOLD, "other": 3}, "step_20: 3 of 64 elements read back are not what the run held"),
        ({**TOLD, "other": None}, "step_20: None of 64 elements"),
    ],
)
def test_anything_else_is_told(told: Any, said: str) -> None:
    (problem,) = saved_account(ranks(told))
    assert problem.startswith(said)
