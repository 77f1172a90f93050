"""Checkpoints: exact continuation, damage noticed, nothing partial under a final name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from nsa.contract import CHECKSUMS_JSON
from nsa.train import checkpoint
from nsa.train.output import write_json
from tests.train.conftest import STEPS
from tests.train.launching import Launch, run

launched = pytest.mark.e2e
slow = pytest.mark.slow


@launched
@slow
def test_a_resumed_run_is_bit_identical(everything: Launch, resumed: Launch) -> None:
    assert resumed.process.returncode == 0, resumed.text()
    names = ("step", "loss", "lr", "grad_norm", "tokens")
    straight = [[row[n] for n in names] for row in everything.rows()][12:]
    assert [[row[n] for n in names] for row in resumed.rows()] == straight
    assert resumed.exit()["param_hash"] == everything.exit()["param_hash"]
    assert resumed.exit()["steps_done"] == STEPS - 12


@launched
@slow
def test_the_damaged_checkpoint_is_refused_and_the_one_before_it_used(resumed: Launch) -> None:
    notes = " ".join(resumed.env()["notes"])
    assert f"step_{STEPS}: model.pt differs from its sha256" in notes
    assert "resumed after step 12" in notes
    assert "damaged checkpoint refused" in resumed.text()


@launched
def test_the_newest_run_goes_on_by_its_link(tmp_path: Path) -> None:
    """A run by hand moves `latest` to itself before it loads the checkpoint of the one before."""
    out = tmp_path / "out"
    args = ["--dataset", "synthetic", "--seq-len", "32", "--out-dir", str(out), "--save"]
    first = run(tmp_path / "first", [*args, "--steps", "2"], harness=False)
    assert first.process.returncode == 0, first.text()
    before = (out / "latest").resolve()
    again = [*args, "--steps", "3", "--resume", str(out / "latest")]
    second = run(tmp_path / "second", again, harness=False)
    assert second.process.returncode == 0, second.text()
    after = (out / "latest").resolve()
    assert after != before
    notes = json.loads((after / "env.json").read_text())["notes"]
    assert f"resumed after step 2 from {before / 'checkpoints' / 'step_2'}" in notes


@launched
@slow
def test_a_checkpoint_is_whole_and_listed(everything: Launch) -> None:
    folder = everything.run_dir / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step_12", "step_24"]
    listed = json.loads((folder / "step_12" / "checksums.json").read_text())
    assert set(listed["sha256"]) == {"model.pt", "optimizer.pt", "rank0.pt", "rank1.pt"}
    paths = [beat["path"] for beat in everything.beats(1, "checkpoint")]
    assert paths == ["checkpoints/step_12", "checkpoints/step_24"]


@launched
@slow
def test_a_checkpoint_that_does_not_fit_on_the_disk_is_named(singles: dict[str, Launch]) -> None:
    launch = singles["checkpoint"]
    assert launch.process.returncode == 1
    assert "checkpoints/.step_1.tmp" in launch.exit()["reason"]
    assert list((launch.run_dir / "checkpoints").iterdir()) == []


def _checkpoint(folder: Path, step: int) -> Path:
    path = folder / "checkpoints" / f"step_{step}"
    path.mkdir(parents=True)
    for name in ("model.pt", "optimizer.pt", "rank0.pt"):
        torch.save({"x": torch.arange(step)}, path / name)
    sums = {file.name: checkpoint._sha256(file) for file in path.iterdir()}
    write_json(path / CHECKSUMS_JSON, {"step": step, "sha256": sums})
    return path


def test_the_newest_sound_one_is_found(tmp_path: Path) -> None:
    for step in (5, 10, 15):
        _checkpoint(tmp_path, step)
    found, refused = checkpoint.find_step(tmp_path, 0)
    assert (found.name, refused) == ("step_15", [])
    assert checkpoint.find_step(found.parent / "step_10", 0)[0].name == "step_10"


@pytest.mark.parametrize("name", ["model.pt", "optimizer.pt", "rank0.pt", "checksums.json"])
def test_every_kind_of_damage_is_noticed(tmp_path: Path, name: str) -> None:
    _checkpoint(tmp_path, 5)
    bad = _checkpoint(tmp_path, 10) / name
    data = bad.read_bytes()
    for damaged in (data[:-3], b"", data[: len(data) // 2], bytes([data[0] ^ 1]) + data[1:]):
        bad.write_bytes(damaged)
        found, refused = checkpoint.find_step(tmp_path, 0)
        assert found.name == "step_5"
        assert "step_10" in refused[0]
    bad.unlink()
    assert checkpoint.find_step(tmp_path, 0)[0].name == "step_5"
    bad.write_bytes(data)
    assert checkpoint.find_step(tmp_path, 0)[0].name == "step_10"


def test_no_sound_checkpoint_is_an_error_with_every_reason(tmp_path: Path) -> None:
    with pytest.raises(checkpoint.CheckpointError, match="no checkpoint"):
        checkpoint.find_step(tmp_path, 0)
    (_checkpoint(tmp_path, 5) / "model.pt").unlink()
    with pytest.raises(checkpoint.CheckpointError, match="no sound checkpoint"):
        checkpoint.find_step(tmp_path, 0)


def test_a_rank_without_its_part_is_refused(tmp_path: Path) -> None:
    _checkpoint(tmp_path, 5)
    with pytest.raises(checkpoint.CheckpointError, match=r"holds no rank1\.pt"):
        checkpoint.find_step(tmp_path, 1)
