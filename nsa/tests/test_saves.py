"""Checkpoints are whole, stay or go as asked, and leave nothing behind.

The trainer's own loop trains a small model here. What it has to do is the contract's
(docs/trainer-contract.md, "Checkpoints"); exit codes are written down again.
"""

from __future__ import annotations

import errno
import gc
import json
import os
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

from nsa.launch.ranks import Ranks
from nsa.settings import TrainSection
from nsa.tests import launched
from nsa.tests.launched import LAST, STEPS, SUCCESS, events, facts_of, kept, launch, rows, trainer
from nsa.train import checkpoint

pytestmark = pytest.mark.topic("checkpoints")
whole = launched.whole

CRASH, CONFIG = 1, 2
# How much worse an evaluation after a step is made than it would be: the third is best.
WORSE = (8.0, 4.0, 1.0, 2.0, 6.0, 4.0)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        (("train.keep_last=1", "train.keep_best=true"), [3, 6]),
        (("train.keep_last=1", "train.keep_every=4"), [4, 6]),
        (("train.keep_last=2", "train.keep_every=2", "train.keep_best=true"), [2, 3, 4, 5, 6]),
    ],
)
def test_checkpoints_that_stay_are_those_that_were_asked_for(
    tmp_path: Path, settings: tuple[str, ...], wanted: list[int]
) -> None:
    """The best one is that with the lowest validation loss. Nothing is left of the others."""
    loop = trainer(tmp_path, "train.eval_every=1", "train.eval_batches=1", *settings)

    def hook(model: nn.Module, _inputs: Any, logits: Tensor) -> Tensor:
        told = "an evaluation keeps a graph for gradients, or leaves the model in its mode"
        assert logits.requires_grad == model.training, told
        return logits if model.training else logits * 8 * WORSE[loop.step - 1]

    loop.engine.model.register_forward_hook(hook)
    end = loop.run()
    assert end.code == SUCCESS, end.reason
    losses = [row["loss"] for row in rows(tmp_path, "val.csv")]
    assert losses.index(min(losses)) == WORSE.index(min(WORSE)), f"others were spoiled: {losses}"
    assert kept(tmp_path) == wanted
    assert len([*(tmp_path / "checkpoints").iterdir()]) == len(wanted), "hidden ones stay"


def test_an_evaluation_without_a_number_is_never_the_best() -> None:
    """No other loss is lower than NaN, so that its checkpoint would stay for good."""
    shape = {"steps": 1, "seq_len": 2, "batch_size": 1, "lr": 0.1}
    keep = TrainSection.model_validate(shape | {"keep_last": 1, "keep_best": True})
    known = {1: torch.nan, 2: 2.0, 3: 3.0, 4: torch.inf, 5: None}
    assert sorted(checkpoint.expendable(known, keep)) == [1, 3, 4]


def test_a_save_leaves_nothing_in_memory(tmp_path: Path) -> None:
    """What a later one holds beyond an earlier one is held once more at every save of a run."""
    loop = trainer(tmp_path, "train.keep_last=1")
    held: dict[int, tuple[int, int]] = {}

    def look(*_: Any) -> None:
        if loop.step in (3, STEPS):
            # Not what a compiler made in this process: its fake tensors lie nowhere.
            tensors = [one for one in gc.get_objects() if type(one) in (Tensor, nn.Parameter)]
            storages = {one.untyped_storage().data_ptr(): one.nbytes for one in tensors}
            held[loop.step] = (sum(storages.values()), psutil.Process().num_fds())

    loop.engine.model.register_forward_hook(look)
    assert loop.run().code == SUCCESS
    (before, files), (after, more_files) = held.values()
    saved = sum(p.nbytes for p in loop.engine.model.parameters())
    assert after - before < saved, f"{STEPS - 3} saves leave {after - before} bytes of tensors"
    assert more_files - files < STEPS - 3, f"{more_files - files} open files stay"


def test_a_save_that_fails_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever goes on would have nothing to go on from, and learn of it at the end."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint._Writer, "write_data", full)
    folder, ended = launch(tmp_path / "run", save_every=2, code=CRASH)
    assert os.strerror(errno.ENOSPC) in ended["reason"], ended
    assert ended["steps_done"] < STEPS and not kept(folder)


# Of docs/trainer-contract.md, "Run directory", what a launch on one rank with saves and evaluations
# writes by itself.
FILES = {
    "env.json", "training.csv", "val.csv", "gates.csv", "heartbeat_rank0.jsonl", "checkpoints",
}  # fmt: skip


@pytest.mark.topic("records")
def test_a_launch_writes_what_its_contract_lists(whole: tuple[Path, dict[str, Any]]) -> None:
    """A further file may grow with every step, and nobody watches it."""
    names = {path.name.partition("_rank0_")[0] for path in whole[0].iterdir()}
    assert names - {"tb", "stackdump"} == FILES


@pytest.mark.topic("records")
def test_no_step_tells_more_than_the_one_before(whole: tuple[Path, dict[str, Any]]) -> None:
    """What grows in every step fills the disk with the square of the steps."""
    for event in ("step_start", "fetched", "step_end", "progress"):
        told = [json.dumps(one).count(",") for one in events(whole[0], event)]
        assert len(told) == STEPS
        assert len(set(told[1:])) == 1, f"{event} of step 2 to {STEPS}: {told[1:]}"


@pytest.mark.topic("records")
def test_progress_is_told_as_the_tables_have_it(whole: tuple[Path, dict[str, Any]]) -> None:
    """Who watches a run goes by it. Gates are those of their latest reading."""
    told = {one["step"]: one for one in events(whole[0], "progress")}
    read = {row["step"]: row for row in rows(whole[0], "gates.csv", "entropy", "max_gate")}
    trained = rows(whole[0], "training.csv", "loss", "toks_per_s", "grad_norm")
    assert [*told] == [row["step"] for row in trained]
    for row in trained:
        found, gates = told[row["step"]], read[max(step for step in read if step <= row["step"])]
        wanted = row | {"gate_entropy": gates["entropy"], "max_gate": gates["max_gate"]}
        assert {name: found[name] for name in wanted} == wanted


def test_all_checkpoints_stay_where_none_may_go(whole: tuple[Path, dict[str, Any]]) -> None:
    """By itself nothing that was saved is removed."""
    assert kept(whole[0]) == list(range(1, STEPS + 1))


def test_a_checkpoint_gets_its_name_once_its_files_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a power cut leaves the name, and files that are empty; and the name is put there, too."""
    sync, rename = os.fsync, os.rename
    on_disk: dict[int, int] = {}
    named: dict[str, dict[str, bool]] = {}

    def synced(file: Any) -> None:
        sync(file)
        found = os.fstat(file if isinstance(file, int) else file.fileno())
        on_disk[found.st_ino] = found.st_size

    def renamed(source: Any, target: Any, **words: Any) -> None:
        if (path := Path(source)).is_dir() and Path(target).name.startswith("step_"):
            held = {file.name: file.stat() for file in path.iterdir()}
            named[Path(target).name] = {
                name: on_disk.get(found.st_ino) == found.st_size for name, found in held.items()
            }
            on_disk.pop(path.parent.stat().st_ino, None)
        rename(source, target, **words)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    folder, _ = launch(tmp_path / "run", save_every=STEPS)
    assert list(named) == [f"step_{STEPS}"], "a checkpoint is written under another name first"
    late = sorted(name for name, sound in named[f"step_{STEPS}"].items() if not sound)
    assert not late, f"not on the disk when the checkpoint got its name: {', '.join(late)}"
    assert (folder / LAST).parent.stat().st_ino in on_disk, "the name is not put on the disk"


@pytest.mark.topic("val_loss")
def test_a_checkpoint_has_the_validation_loss_of_its_own_step_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What keeps the best one reads it there: the mean of all ranks, not this one's own."""

    def with_another(_: Ranks, own: list[float]) -> list[float]:
        """The other rank raises no flag, and each of its batches is 3 nats worse."""
        return own if len(own) == 1 else [2 * own[0] + 3 * own[1], 2 * own[1]]

    monkeypatch.setattr(Ranks, "sum", with_another)
    folder, _ = launch(tmp_path / "run")
    losses = {row["step"]: row["loss"] for row in rows(folder, "val.csv")}
    told = {step: facts_of(folder / f"checkpoints/step_{step}") for step in kept(folder)}
    assert sorted(losses) == [2, 4, 6] and sorted(told) == list(range(1, STEPS + 1))
    evaluated = {step: facts["val_loss"] for step, facts in told.items() if step in losses}
    assert evaluated == pytest.approx(losses, rel=1e-6)
    assert {facts["val_loss"] for step, facts in told.items() if step not in losses} == {None}


def test_a_checkpoint_goes_only_once_the_next_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that dies while it saves has the one before."""
    write, there = checkpoint.write_json, []

    def last_of_a_save(*words: Any) -> None:
        there.append(kept(tmp_path))
        write(*words)

    monkeypatch.setattr(checkpoint, "write_json", last_of_a_save)
    assert trainer(tmp_path, "train.keep_last=1").run().code == SUCCESS
    assert there == [[], *([step] for step in range(1, STEPS))]
