"""Which checkpoints stay."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nsa.contract import CHECKSUMS_JSON
from nsa.train.checkpoint.retention import Retention, prune

LOSSES = {100: 3.0, 200: 2.0, 300: None, 400: float("nan"), 500: 2.5, 600: 2.4}


@pytest.mark.parametrize(
    ("keep", "gone"),
    [
        (Retention(), []),
        (Retention(last=2), [100, 200, 300, 400]),
        (Retention(last=10), []),
        (Retention(last=1, every=300), [100, 200, 400, 500]),
        (Retention(last=1, best=True), [100, 300, 400, 500]),
        (Retention(last=2, every=400, best=True), [100, 300]),
    ],
)
def test_what_may_go(keep: Retention, gone: list[int]) -> None:
    assert keep.expendable(LOSSES) == gone


def test_the_best_is_the_first_of_equals_and_none_without_evaluations() -> None:
    keep = Retention(last=1, best=True)
    assert keep.expendable({1: 2.0, 2: 2.0, 3: 3.0}) == [2]
    assert keep.expendable({1: None, 2: None, 3: None}) == [1, 2]


def test_pruning_leaves_nothing_half_removed_and_touches_nothing_else(tmp_path: Path) -> None:
    for step, loss in LOSSES.items():
        folder = tmp_path / f"step_{step}"
        folder.mkdir()
        text = json.dumps({"step": step, "val_loss": loss}) if step != 300 else "torn"
        (folder / CHECKSUMS_JSON).write_text(text)
    (tmp_path / ".step_700.tmp").mkdir()
    prune(tmp_path, Retention(last=2, best=True))
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [".step_700.tmp", "step_200", "step_500", "step_600"]
