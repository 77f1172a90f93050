"""Saves that go on while training does, whole or not at all; going on from one; which ones stay."""

from __future__ import annotations

import errno
import os
import pickle
import pickletools
import resource
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from nsa.contract import (
    CHECKSUMS_JSON,
    METADATA_FILE,
    CheckpointError,
    Event,
    checkpoint_name,
    shard_file,
)
from nsa.contract.digests import sha256_of
from nsa.launch.output import Heartbeat, RecordWriteError, write_json
from nsa.settings import TrainSection
from nsa.step.engine import Engine
from nsa.train import restore
from nsa.train.checkpoint import Saves, expendable, own_share
from nsa.train.restore import ReadBack, shared_state
from runbook.folder.launch.shapes import shape_of, shaped
from tests.train import engines
from tests.train.conftest import STEPS
from tests.train.launching import Launch

S = 32
POSITION = {"epoch": 2, "rest": [1, 2, 3]}


def engine(*args: str, **toggles: str) -> Engine:
    return engines.engine("--seq-len", str(S), *args, **toggles)


def train(trainer: Engine, step: int = 1) -> None:
    trainer.compute([engines.batch(step, S)])
    trainer.update(step)


def watched(folder: Path, trainer: Engine) -> tuple[Saves, ReadBack]:
    """Where a trainer saves, and what reads its saves back."""
    return Saves(folder, trainer, Heartbeat(rank=0, token="t")), ReadBack(trainer, token="t")


def save(store: Saves, step: int) -> Path:
    store.begin(step=step, position=POSITION, val_loss=None)
    store.finish()
    return store.folder / checkpoint_name(step)


def trained_and_saved(folder: Path) -> tuple[Engine, Path]:
    """After one step, and its checkpoint."""
    trainer = engine()
    train(trainer)
    return trainer, save(watched(folder, trainer)[0], 1)


def test_torchs_own_tool_reads_it(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    trainer, path = trained_and_saved(tmp_path)
    dcp_to_torch_save(path, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert {f"model.{name}" for name, _ in trainer.model.named_parameters()} <= set(whole)


def test_what_the_disk_says_of_a_share_is_told_and_not_what_torch_makes_of_it(
    tmp_path: Path,
) -> None:
    """A real limit: the share does not fit into a file, as it would not on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 10, before[1]))
    try:
        with pytest.raises(RecordWriteError, match=r"\.step_1\.tmp: File too large") as told:
            trained_and_saved(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert told.value.errno == errno.EFBIG
    assert not list((tmp_path / "checkpoints").iterdir())


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    _, path = trained_and_saved(tmp_path)
    with pytest.raises(CheckpointError, match=r"another model: model\.layers\.1\."):
        restore.load(path, engine("--set", "model.n_layers=1"))


# -- fp16 and its scaler, the learning rate, accumulation ------------------------------------------


def _scales(steps: int, **toggles: str) -> list[float]:
    """The scale before the first step and after each."""
    trainer = engine("--precision", "fp16", **toggles)
    found = [trainer.scaler.get_scale()]
    for step in range(1, steps + 1):
        train(trainer, step)
        found.append(trainer.scaler.get_scale())
    return found


def test_the_scaler_begins_and_grows_as_its_toggles_say() -> None:
    interval, factor = "NSA_SCALER_GROWTH_INTERVAL", "NSA_SCALER_GROWTH_FACTOR"
    first = {"NSA_SCALER_INIT_SCALE": "512"}
    assert _scales(2, **first) == [512, 512, 512]  # the default interval is 2,000
    assert _scales(4, **first, **{interval: "2"}) == [512, 512, 1024, 1024, 2048]
    assert _scales(2, **first, **{interval: "1", factor: "4"}) == [512, 2048, 8192]


def test_an_overflow_backs_off_as_its_toggle_says() -> None:
    # A loss of 5.6 times 2^40 has no finite fp16 gradient.
    huge = {"NSA_SCALER_INIT_SCALE": str(2.0**40)}
    assert _scales(1, **huge) == [2.0**40, 2.0**39]
    assert _scales(2, **huge, NSA_SCALER_BACKOFF_FACTOR="0.25") == [2.0**40, 2.0**38, 2.0**36]


@pytest.mark.parametrize("broken", [None, 1, 3])
def test_every_checkpoint_is_read_back(tmp_path: Path, broken: int | None) -> None:
    """Three saves of which the newest alone stays; one holds other weights than the run."""
    trainer = engine("--set", "train.keep_last=1")
    store, noted = watched(tmp_path, trainer)
    noted.note(0)  # there are no moments yet, as where a scaler leaves the first updates out
    for step in (1, 2, 3):
        train(trainer, step)
        if step > 1:
            elements, differ = noted.compare(store.folder)
            assert sum(differ.values()) == (elements if broken == step - 1 else 0)
        noted.note(step)
        with torch.no_grad():
            for state in shared_state(trainer).values():
                state.add_(int(step == broken))
        save(store, step)
    told = noted.report(store.folder)
    assert told is not None
    assert (told["read"], told["wrong"]) == (3, [] if broken is None else [broken])
    assert (told["other"] > 0) == (broken == 3)
    assert told["unreadable"] is None
    assert told["elements"] == sum(min(64, one.numel()) for one in shared_state(trainer).values())
    assert told["kept"] == [3]


def saved_and_noted(folder: Path) -> tuple[Saves, ReadBack]:
    """A store with one save, of step 1, and what has to read it."""
    trainer = engine()
    store, noted = watched(folder, trainer)
    train(trainer)
    noted.note(1)
    save(store, 1)
    return store, noted


def test_a_checkpoint_that_is_gone_ends_no_run(tmp_path: Path) -> None:
    store, noted = saved_and_noted(tmp_path)
    shutil.rmtree(store.folder / checkpoint_name(1))
    elements, differ = noted.compare(store.folder)
    assert sum(differ.values()) == elements > 0


def test_a_file_that_ends_before_any_of_its_tensors_is_told(tmp_path: Path) -> None:
    """Its digest is right."""
    store, noted = saved_and_noted(tmp_path)
    (file,) = (store.folder / checkpoint_name(1)).glob("*.distcp")
    assert noted.compare(store.folder)[1] == {}
    os.truncate(file, file.stat().st_size - 1)
    told = noted.report(store.folder)
    assert told is not None and f"{file.name} has {file.stat().st_size} bytes" in told["unreadable"]
    with pytest.raises(CheckpointError, match="bytes, "):
        restore.read(file.parent, names=["rank0.position"])


def _as_in_python_3_11_2(self: object, protocol: int) -> tuple[object, ...]:
    del protocol
    return getattr, (type(self), self._name_)  # type: ignore[attr-defined]


def test_the_list_of_tensors_is_of_known_classes_on_any_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.11.2 keeps members of enumerations by `getattr`, which runs what it is given."""
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", _as_in_python_3_11_2)
    trainer, path = trained_and_saved(tmp_path)
    pickled = (path / METADATA_FILE).read_bytes()
    texts = {text for _, text, _ in pickletools.genops(pickled) if isinstance(text, str)}
    modules = {text for text in texts if text in sys.modules}
    assert "torch.distributed.checkpoint.metadata" in modules <= {*restore._HARMLESS, "torch"}
    assert "getattr" not in texts
    assert restore.read(path).keys() == own_share(trainer, POSITION).keys()


def test_why_a_checkpoint_cannot_be_read_back_is_told(tmp_path: Path) -> None:
    store, noted = saved_and_noted(tmp_path)
    (store.folder / checkpoint_name(1) / METADATA_FILE).write_bytes(pickle.dumps(print))
    told = noted.report(store.folder)
    assert told is not None and told["positions"] is None
    assert told["unreadable"].endswith(f"{METADATA_FILE} names builtins.print")
    told_shape = shape_of("events")[Event.EXIT]
    assert shaped({"saved": told}, told_shape, "exit") == ({"saved": told}, [])


launched = pytest.mark.e2e


@launched
def test_a_resumed_run_is_bit_identical(everything: Launch, resumed: Launch) -> None:
    assert resumed.process.returncode == 0, resumed.text()
    names = ("step", "loss", "lr", "grad_norm", "tokens")
    straight = [[row[n] for n in names] for row in everything.rows()][12:]
    assert [[row[n] for n in names] for row in resumed.rows()] == straight
    assert resumed.exit()["param_hash"] == everything.exit()["param_hash"]
    assert resumed.exit()["steps_done"] == STEPS - 12


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
