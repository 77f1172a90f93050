"""Which checkpoints stay; what the config asks for is in `nsa.tests.test_safeguards`."""

from __future__ import annotations

import json
from pathlib import Path

from nsa.contract import CHECKSUMS_JSON
from nsa.settings import TrainSection
from nsa.train.checkpoint import expendable, prune

LOSSES = {100: 3.0, 200: 2.0, 300: None, 400: float("nan"), 500: 2.5, 600: 2.4}


def keeping(last: int = 0, every: int = 0, best: bool = False) -> TrainSection:
    keep = {"keep_last": last, "keep_every": every, "keep_best": best}
    return TrainSection.model_validate(
        {"steps": 1, "seq_len": 2, "batch_size": 1, "lr": 0.1} | keep
    )


def test_the_best_is_the_first_of_equals_and_none_without_evaluations() -> None:
    keep = keeping(last=1, best=True)
    assert expendable({1: 2.0, 2: 2.0, 3: 3.0}, keep) == [2]
    assert expendable({1: None, 2: None, 3: None}, keep) == [1, 2]


def test_pruning_leaves_nothing_half_removed_and_touches_nothing_else(tmp_path: Path) -> None:
    for step, loss in LOSSES.items():
        folder = tmp_path / f"step_{step}"
        folder.mkdir()
        text = json.dumps({"step": step, "val_loss": loss}) if step != 300 else "torn"
        (folder / CHECKSUMS_JSON).write_text(text)
    (tmp_path / ".step_700.tmp").mkdir()
    prune(tmp_path, keeping(last=2, best=True))
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [".step_700.tmp", "step_200", "step_500", "step_600"]
