"""Where a leg begins: at a whole checkpoint of its own run, and what is said of the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nsa.contract import CHECKSUMS_JSON, METADATA_FILE, shard_file
from nsa.contract.digests import identity_of, sha256_of
from runbook.engine.starting import begin_at
from runbook.errors import RunbookError
from runbook.records import Launch
from tests.launch.helpers import fake_launch

SHARD = shard_file(0)


def leg(number: int) -> Launch:
    change = {
        "phase": "production",
        "run_dir": f"production/leg{number}",
        "resumes": f"leg{number - 1}",
        "after": 50 * (number - 1),
    }
    return fake_launch(name=f"leg{number}", steps=50 * number).model_copy(update=change)


def checkpoint(root: Path, launch: str, step: int) -> Path:
    """A launch that wrote a checkpoint of this step, and said so in its heartbeats."""
    folder = root / "production" / launch
    made = written(folder / "checkpoints" / f"step_{step}", "weights")
    beat = {
        "schema_version": 1, "event": "checkpoint", "rank": 0, "pid": 7, "run_token": "ab" * 8,
        "ts": 1.0, "mono": 1.0, "step": step, "phase": "checkpoint", "seconds": 0.5,
        "path": f"checkpoints/step_{step}", "sha256": identity_of(made),
    }  # fmt: skip
    (folder / "heartbeat_rank0.jsonl").write_text(json.dumps(beat) + "\n")
    return made


def written(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True)
    for name in (METADATA_FILE, SHARD):
        (folder / name).write_text(text)
    sums = {name: sha256_of(folder / name) for name in (METADATA_FILE, SHARD)}
    (folder / CHECKSUMS_JSON).write_text(json.dumps({"step": 1, "sha256": sums}))
    return folder


def found(root: Path, number: int = 3) -> tuple[str, int]:
    begun = begin_at(root, leg(number))
    assert begun is not None
    return begun.path, begun.step


def test_a_leg_begins_at_the_end_of_the_one_before_it(tmp_path: Path) -> None:
    checkpoint(tmp_path, "leg1", 50)
    checkpoint(tmp_path, "leg2", 100)
    checkpoint(tmp_path, "leg3.unfinished1", 107)
    assert found(tmp_path) == ("production/leg2/checkpoints/step_100", 100)
    assert found(tmp_path, 2) == ("production/leg1/checkpoints/step_50", 50)


def test_instead_of_a_damaged_one_the_newest_that_is_left(tmp_path: Path) -> None:
    checkpoint(tmp_path, "leg1", 50)
    (checkpoint(tmp_path, "leg2", 100) / SHARD).write_text("weightz")
    saved = checkpoint(tmp_path, "leg3.unfinished1", 107)
    begun = begin_at(tmp_path, leg(3))
    assert begun is not None and begun.step == 107
    assert begun.path == "production/leg3.unfinished1/checkpoints/step_107"
    assert begun.refused == (
        f"production/leg2/checkpoints/step_100: {SHARD} differs from its sha256",
    )
    (saved / SHARD).unlink()
    assert found(tmp_path) == ("production/leg1/checkpoints/step_50", 50)


def test_a_checkpoint_of_another_run_is_not_used(tmp_path: Path) -> None:
    (checkpoint(tmp_path, "leg2", 100)).rename(tmp_path / "mine")
    written(tmp_path / "production/leg2/checkpoints/step_100", "another seed's")
    with pytest.raises(RunbookError, match="leg2/checkpoints/step_100: is not the checkpoint that"):
        begin_at(tmp_path, leg(3))
    checkpoint(tmp_path, "leg1", 50)
    assert found(tmp_path) == ("production/leg1/checkpoints/step_50", 50)


def test_a_trainer_that_tells_no_digest_finds_its_own(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "leg2", 100).parents[1]
    path = folder / "heartbeat_rank0.jsonl"
    beat = json.loads(path.read_text())
    del beat["sha256"]
    path.write_text(json.dumps(beat) + "\n")
    assert begin_at(tmp_path, leg(3)) is None
