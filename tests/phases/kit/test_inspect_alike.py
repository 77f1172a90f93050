"""`inspect` on a directory and the rows of a run say the same about it, in the same words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runbook.records import Outcome
from runbook.tools.inspect import RemarkCode
from runbook.tools.inspect.folder import inspect_path
from tests.phases import builder, on_disk, spoil
from tests.phases.kit.test_hostile_files import from_disk
from tests.phases.training.test_balance import ROWS, SPOILED

WHERE = builder.context("cpu", steps_scale=0.2)
CHANGES: dict[str, spoil.Change] = {
    "healthy": lambda made: made,
    **{row: change for row, change, _, _ in SPOILED},
    "half of the tokens": spoil.columns(tokens=lambda t: t["tokens"] / 2),
}


@pytest.mark.parametrize("name", CHANGES)
def test_inspect_and_judge_say_alike(tmp_path: Path, name: str) -> None:
    found = builder.evidence("baseline", WHERE, change=CHANGES[name], only=["run1"])
    for made in found.launches.values():
        on_disk.write_launch(tmp_path, made)
    rows = {
        check.id.partition(".")[2]: check
        for check in builder.judge("baseline", from_disk(tmp_path, found), WHERE).checks
    }
    said = [
        remark.message
        for remark in inspect_path(tmp_path / "baseline/run1").remarks
        if remark.code is RemarkCode.UNBALANCED
    ]
    judged = [rows[what] for what in ROWS]
    assert bool(said) == any(check.outcome is not Outcome.PASS for check in judged)
    assert bool(said) == (name != "healthy")
    reasons = "; ".join(check.reason for check in judged)
    assert all(text in reasons for text in said), (said, reasons)


@pytest.mark.parametrize("ranks", [3, [{"rank": "x"}], {"a": 1}])
def test_ends_of_ranks_that_cannot_be_read_are_told(tmp_path: Path, ranks: object) -> None:
    found = builder.evidence("baseline", WHERE, only=["run1"])
    for made in found.launches.values():
        on_disk.write_launch(tmp_path, made)
    path = tmp_path / "baseline/run1/result.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "ranks": ranks}))
    said = [remark.message for remark in inspect_path(path.parent).remarks]
    assert "result.json: its `ranks` are no ends of ranks" in said
