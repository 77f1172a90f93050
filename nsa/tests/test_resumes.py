"""A run goes on from a checkpoint as if it had not stopped, or refuses it.

The trainer's own loop trains a small model here. What it has to do is the contract's
(docs/trainer-contract.md, "Checkpoints"); exit codes are written down again.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from nsa.contract import (
    CHECKSUMS_JSON,
    RUN_DIR_VARIABLE,
    RUN_TOKEN_VARIABLE,
    CheckpointError,
    shard_file,
)
from nsa.contract.digests import damage, sha256_of
from nsa.launch.plan import Place, plan_launch
from nsa.launch.process import Termination
from nsa.launch.ranks import Ranks
from nsa.settings import TrainSection
from nsa.tests import launched
from nsa.tests.built import BATCHED, write_config
from nsa.tests.launched import (
    LAST,
    MIDDLE,
    SAVED,
    SCALED,
    STEPS,
    copied,
    facts_of,
    kept,
    launch,
    rows,
    tell,
    trainer,
    wait_for_step,
)
from nsa.tests.maths import device
from nsa.train import checkpoint, restore
from nsa.train.loop import Loop
from nsa.train.session import train

pytestmark = pytest.mark.topic("checkpoints")
whole = launched.whole

CONFIG = 2
OTHER = "mlp, own head"


# Larger than what a reader of beginnings takes.
LARGE = 24 << 20
# What the first number that is another one tells, in the step after a save. In later ones it is
# what the update between them went by.
ABOUT = {
    "loss": "the weights and the place in the data",
    "grad_norm": "gradients that are left over",
    "lr": "the place in the schedule",
}
OF_THE_UPDATE = "moments and step counts of the optimizer"


def test_a_run_that_goes_on_from_a_checkpoint_ends_as_if_it_had_not_stopped(
    tmp_path: Path, whole: tuple[Path, dict[str, Any]]
) -> None:
    """The same batches, losses, gradients and rates; at the end the same weights, bit by bit."""
    check_goes_on(tmp_path, whole[0], whole)


def test_a_checkpoint_has_the_weights_that_only_other_models_have(tmp_path: Path) -> None:
    """A head of its own, and what compresses."""
    other = launch(tmp_path / "whole", case=OTHER)
    check_goes_on(tmp_path, other[0], other, case=OTHER)


def test_random_numbers_go_on_as_after_the_step_that_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our model draws none while it trains, so each step begins a sequence of its own here."""
    begun: list[list[Tensor]] = []
    run = Loop.run

    def seeded(loop: Loop) -> Any:
        def seed(*_: Any) -> None:
            torch.manual_seed(1000 + loop.step)

        begun.append(random_states())
        loop.engine.model.register_forward_hook(seed)
        return run(loop)

    monkeypatch.setattr(Loop, "run", seeded)
    folder, _ = launch(tmp_path / "first", save_every=SAVED)
    launch(tmp_path / "on", "--resume", str(folder / MIDDLE))
    torch.manual_seed(1000 + SAVED)
    wanted = random_states()
    assert not all(map(torch.equal, wanted, begun[0])), "the seed of the config would do"
    assert all(map(torch.equal, wanted, begun[1])), "random numbers begin anew"


def random_states() -> list[Tensor]:
    """Those of the host, and of the device under test."""
    on_cuda = device().type == "cuda"
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if on_cuda else [])]


def test_a_save_is_of_one_moment_however_long_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: tuple[Path, dict[str, Any]]
) -> None:
    """Nothing is written before training has gone on to its last step."""
    write, gone_on = checkpoint._Writer.write_data, threading.Event()

    def late(self: Any, *words: Any) -> Any:
        if not gone_on.is_set():
            wait_for_step(tmp_path / "slow", STEPS)
            gone_on.set()
        return write(self, *words)

    monkeypatch.setattr(checkpoint._Writer, "write_data", late)
    folder, _ = launch(tmp_path / "slow", save_every=SAVED)
    assert gone_on.is_set() and kept(folder) == [SAVED, STEPS]
    check_goes_on(tmp_path, folder, whole)


def check_goes_on(
    folder: Path, source: Path, whole: tuple[Path, dict[str, Any]], **how: Any
) -> None:
    """A launch from the middle checkpoint of `source` does what the whole one did from there."""
    torch.manual_seed(99)  # as another process, whose random numbers are others
    folder, ended = launch(folder / "on", "--resume", str(source / MIDDLE), **how)
    wanted, found = (rows(run_dir, "training.csv") for run_dir in (whole[0], folder))
    assert [row["step"] for row in found] == [SAVED + 1, SAVED + 2, SAVED + 3]
    for row, other in zip(found, wanted[SAVED:], strict=True):
        step = int(row["step"])
        for what, about in ABOUT.items():
            restored = about if step == SAVED + 1 else OF_THE_UPDATE
            told = f"step {step}: {what} is {row[what]!r}, not {other[what]!r}: look at {restored}"
            assert row[what] == other[what], told
    assert ended["param_hash"] == whole[1]["param_hash"], f"other weights: look at {OF_THE_UPDATE}"


def test_the_scale_of_fp16_goes_on_as_it_was(tmp_path: Path) -> None:
    """It has grown by the save, and grows again: a run that begins it anew ends with another."""
    variables = {**SCALED, "NSA_SCALER_GROWTH_INTERVAL": "2"}
    how: dict[str, Any] = {"precision": "fp16", "variables": variables, "save_every": SAVED}
    folder, _ = launch(tmp_path / "first", **how)
    on, _ = launch(tmp_path / "on", "--resume", str(folder / MIDDLE), **how)
    first, wanted, found = (
        facts_of(one / step)["scaler"]
        for one, step in ((folder, MIDDLE), (folder, LAST), (on, LAST))
    )
    assert first["scale"] > 256.0 and first["_growth_tracker"] > 0, f"nothing to restore: {first}"
    assert found == wanted


def test_a_damaged_checkpoint_is_refused_and_an_evaluation_that_is_owed_is_made(
    tmp_path: Path, whole: tuple[Path, dict[str, Any]]
) -> None:
    """One bit of the newest is another; the one before it was saved without its evaluation."""
    folder = copied(whole[0], tmp_path / "run", 4, 5)
    spoil(folder / "checkpoints/step_5")
    tell(folder / "checkpoints/step_4", val_loss=None)
    on, _ = launch(tmp_path / "on", "--resume", str(folder))
    resumed = json.loads((on / "env.json").read_text())["resumed"]
    assert (resumed["step"], len(resumed["refused"])) == (4, 1), resumed
    assert [row["step"] for row in rows(on, "training.csv")] == [5, 6]
    assert rows(on, "val.csv") == rows(whole[0], "val.csv")[1:]


def spoil(folder: Path) -> None:
    """One bit of a checkpoint becomes another."""
    shard = folder / shard_file(0)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)


def test_a_checkpoint_that_would_run_code_is_refused(
    tmp_path: Path, whole: tuple[Path, dict[str, Any]]
) -> None:
    """Whoever gave it to you also wrote its digests."""
    folder = copied(whole[0], tmp_path / "run", 3)
    description = folder / MIDDLE / ".metadata"
    description.write_bytes(pickle.dumps(Code(str(tmp_path / "it ran"))))
    sums = facts_of(folder / MIDDLE)["sha256"]
    tell(folder / MIDDLE, sha256={**sums, description.name: sha256_of(description)})
    _, ended = launch(tmp_path / "on", "--resume", str(folder), code=CONFIG)
    assert not (tmp_path / "it ran").exists(), ended


class Code:
    """What makes a folder as soon as it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("place", [0, LARGE // 2, LARGE - 1])
def test_a_large_file_of_a_checkpoint_is_known_by_all_of_its_bytes(
    tmp_path: Path, place: int
) -> None:
    """Those of the other tests end where a reader of heads may not have stopped yet."""
    names = (".metadata", "__0_0.distcp")
    content = bytes(LARGE)
    for name in names:
        (tmp_path / name).write_bytes(content)
    sums = dict.fromkeys(names, hashlib.sha256(content).hexdigest())
    (tmp_path / CHECKSUMS_JSON).write_text(json.dumps({"sha256": sums}))
    assert damage(tmp_path) is None
    with (tmp_path / names[1]).open("r+b") as file:
        file.seek(place)
        file.write(b"\1")
    assert damage(tmp_path), f"byte {place} of {LARGE} is another one"


def test_the_newest_checkpoint_is_that_of_the_highest_step(
    tmp_path: Path, whole: tuple[Path, dict[str, Any]]
) -> None:
    """Also where its number has a digit more."""
    folder = copied(whole[0], tmp_path / "run", 5, 6)
    newest = (folder / "checkpoints/step_6").rename(folder / "checkpoints/step_10")
    assert restore.find_step(folder, 0) == (newest, [])
    shape = {"steps": 1, "seq_len": 2, "batch_size": 1, "lr": 0.1}
    keep = TrainSection.model_validate(shape | {"keep_last": 1})
    assert checkpoint.expendable({9: None, 12: None}, keep) == [9]


def test_a_run_that_saved_nothing_is_followed_to_what_it_went_on_from(
    tmp_path: Path, whole: tuple[Path, dict[str, Any]]
) -> None:
    """Or one that is stopped again before its first save cannot go on."""
    on, _ = launch(tmp_path / "on", "--resume", str(whole[0] / MIDDLE))
    shutil.rmtree(on / "checkpoints")
    assert restore.find_step(on, 0) == (whole[0] / MIDDLE, [])


def test_a_checkpoint_of_more_ranks_is_refused(
    tmp_path: Path, whole: tuple[Path, dict[str, Any]]
) -> None:
    """One rank would go on with a part of their data."""
    folder = copied(whole[0], tmp_path / "run", 3)
    tell(folder / MIDDLE, world_size=2)
    _, ended = launch(tmp_path / "on", "--resume", str(folder), code=CONFIG)
    assert "written by 2 ranks" in ended["reason"], ended


def test_every_rank_goes_on_at_its_own_place_in_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: tuple[Path, dict[str, Any]]
) -> None:
    """Of documents, each rank has others: rank 1 of two reads its own of two places."""
    saved = restore.read(whole[0] / MIDDLE)
    place = {"file": 1, "line": 17}
    own = torch.Generator().manual_seed(7).get_state()
    told = torch.frombuffer(bytearray(json.dumps(place).encode()), dtype=torch.uint8)
    saved |= {"rank1.rng": own, "rank1.position": told}
    folder = tmp_path / MIDDLE
    facts = {"step": 3, "world_size": 2, "scaler": {}}
    (tmp_path / "new").mkdir()
    loop = trainer(tmp_path / "new", layers=2)
    write = checkpoint._Writer(folder, facts, loop.plan.config.train)
    save_tensors(saved, storage_writer=write, no_dist=True)
    shard = folder / shard_file(1)
    shutil.copy(folder / shard_file(0), shard)
    tell(folder, sha256={**facts_of(folder)["sha256"], shard.name: sha256_of(shard)})
    engine = loop.engine
    one = Place(rank=1, local_rank=1, world_size=2, nodes=1, from_torchrun=True)
    engine.ranks = Ranks(place=one, device=device(), grouped=True)
    # The other one found what this one found.
    monkeypatch.setattr(Ranks, "same_everywhere", lambda _, digest: bool(digest))
    assert restore.load(folder, engine).position == place
    assert torch.equal(torch.get_rng_state(), own)


def test_ranks_that_found_other_checkpoints_do_not_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: tuple[Path, dict[str, Any]]
) -> None:
    """Told the same folder, one of them has a part of the newest that is damaged."""
    folder = copied(whole[0], tmp_path / "run", 4, 5)
    asked: list[str] = []
    monkeypatch.setattr(Ranks, "same_everywhere", lambda _, digest: asked.append(digest))
    (tmp_path / "new").mkdir()
    engine = trainer(tmp_path / "new", layers=2).engine
    for _ in range(2):
        with pytest.raises(CheckpointError):
            restore.load(folder, engine)
        spoil(folder / "checkpoints/step_5")
    assert len(asked) == 2 and asked[0] != asked[1], "they only compare what they were told"


def test_nothing_is_added_to_a_folder_that_was_used(
    tmp_path: Path, whole: tuple[Path, dict[str, Any]]
) -> None:
    """Whoever is told to write there is refused, and leaves every file as it was."""
    used = tmp_path / "used"
    shutil.copytree(whole[0], used)
    before = {path: path.read_bytes() for path in used.rglob("*") if path.is_file()}
    variables = {**BATCHED, RUN_DIR_VARIABLE: str(used), RUN_TOKEN_VARIABLE: "5afe5afe"}
    file = write_config("avg, tied head", tmp_path, steps=1)
    plan = plan_launch(["--config", str(file), "--ddp", "0"], variables)
    assert train(plan, Termination()) == CONFIG
    assert {path: path.read_bytes() for path in used.rglob("*") if path.is_file()} == before
