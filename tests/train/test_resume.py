"""Going on from a checkpoint: exact, damage noticed, nothing partial; and which ones stay."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from nsa.contract import CHECKSUMS_JSON, METADATA_FILE, CheckpointError, shard_file
from nsa.contract.digests import sha256_of
from nsa.launch.output import write_json
from nsa.settings import TrainSection
from nsa.train import restore
from nsa.train.checkpoint import expendable
from tests.train.conftest import STEPS
from tests.train.launching import Launch

launched = pytest.mark.e2e


@launched
def test_a_resumed_run_is_bit_identical(everything: Launch, resumed: Launch) -> None:
    assert resumed.process.returncode == 0, resumed.text()
    names = ("step", "loss", "lr", "grad_norm", "tokens")
    straight = [[row[n] for n in names] for row in everything.rows()][12:]
    assert [[row[n] for n in names] for row in resumed.rows()] == straight
    assert resumed.exit()["param_hash"] == everything.exit()["param_hash"]
    assert resumed.exit()["steps_done"] == STEPS - 12


@launched
def test_a_checkpoint_is_whole_and_listed(everything: Launch) -> None:
    folder = everything.run_dir / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step_12", "step_24"]
    listed = json.loads((folder / "step_12" / CHECKSUMS_JSON).read_text())
    assert set(listed["sha256"]) == {METADATA_FILE, shard_file(0), shard_file(1)}
    assert listed["val_loss"] is None  # evaluated at 8, 16 and 24
    evaluated = json.loads((folder / "step_24" / CHECKSUMS_JSON).read_text())
    assert evaluated["val_loss"] == everything.beats(0, "eval")[-1]["loss"]
    for rank in range(2):
        beats = everything.beats(rank, "checkpoint")
        assert [b["path"] for b in beats] == ["checkpoints/step_12", "checkpoints/step_24"]
        assert all(0 < b["held_up_s"] <= b["seconds"] for b in beats)


def _gradients(launch: Launch) -> list[torch.Tensor]:
    """After one AdamW step from zero the first moment is (1 - beta1) times the gradient."""
    saved = restore.read(launch.run_dir / "checkpoints" / "step_1")
    return [saved[name] / 0.1 for name in sorted(saved) if name.endswith(".exp_avg")]


@launched
def test_ddp_proof_gradients_of_two_ranks_are_those_of_one(one_step: dict[int, Launch]) -> None:
    """Two ranks with two micro-batches each, against one rank with the whole batch at once."""
    assert [launch.process.returncode for launch in one_step.values()] == [0, 0]
    alone, together = _gradients(one_step[1]), _gradients(one_step[2])
    assert len(alone) == len(together) > 10
    for one, two in zip(alone, together, strict=True):
        assert one.abs().max() > 0
        torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-6)


def _checkpoint(folder: Path, step: int) -> Path:
    path = folder / "checkpoints" / f"step_{step}"
    path.mkdir(parents=True)
    for name in (METADATA_FILE, shard_file(0)):
        (path / name).write_bytes(f"{name} of {step}".encode())
    sums = {file.name: sha256_of(file) for file in path.iterdir()}
    write_json(path / CHECKSUMS_JSON, {"step": step, "sha256": sums})
    return path


def test_what_is_being_written_or_removed_is_no_checkpoint(tmp_path: Path) -> None:
    _checkpoint(tmp_path, 5)
    torn = _checkpoint(tmp_path, 10)
    torn.rename(torn.with_name(".step_10.tmp"))
    leaving = _checkpoint(tmp_path, 15)
    leaving.rename(leaving.with_name(".step_15.removed"))
    assert restore.find_step(tmp_path, 0) == (tmp_path / "checkpoints" / "step_5", [])


@pytest.mark.parametrize("name", [METADATA_FILE, shard_file(0), CHECKSUMS_JSON])
def test_every_kind_of_damage_is_noticed(tmp_path: Path, name: str) -> None:
    _checkpoint(tmp_path, 5)
    bad = _checkpoint(tmp_path, 10) / name
    data = bad.read_bytes()
    for damaged in (data[:-3], b"", data[: len(data) // 2], bytes([data[0] ^ 1]) + data[1:]):
        bad.write_bytes(damaged)
        found, refused = restore.find_step(tmp_path, 0)
        assert found.name == "step_5"
        assert "step_10" in refused[0]
    bad.unlink()
    assert restore.find_step(tmp_path, 0)[0].name == "step_5"
    bad.write_bytes(data)
    assert restore.find_step(tmp_path, 0)[0].name == "step_10"


def test_a_rank_without_its_part_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint"):
        restore.find_step(tmp_path, 0)
    _checkpoint(tmp_path, 5)
    with pytest.raises(CheckpointError, match=r"holds no __1_0\.distcp"):
        restore.find_step(tmp_path, 1)


def test_the_best_is_the_first_of_equals_and_none_without_evaluations() -> None:
    given = {"steps": 1, "seq_len": 2, "batch_size": 1, "lr": 0.1}
    keep = TrainSection.model_validate({**given, "keep_last": 1, "keep_best": True})
    assert expendable({1: 2.0, 2: 2.0, 3: 3.0}, keep) == [2]
    assert expendable({1: None, 2: float("nan"), 3: None}, keep) == [1, 2]
