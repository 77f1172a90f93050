"""The trainer stops at numbers that are not finite, and when it is told to.

The trainer's own loop trains a small model here, and numbers are spoiled from outside, by hooks of
torch. What it then has to do is the contract's (docs/trainer-contract.md, "Exit codes",
"Stopping"); exit codes are written down again.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection
from importlib.util import module_from_spec, spec_from_file_location
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nsa.data import Batch
from nsa.launch.plan import Place
from nsa.launch.process import take_signals
from nsa.launch.ranks import Ranks, parameter_hash
from nsa.step import numbers
from nsa.step.engine import StepOutcome
from nsa.step.numbers import Posted, post
from nsa.tests.built import flat, mean_gradient
from nsa.tests.launched import SPOILED, SPOILS, STEPS, SUCCESS, kept, rows, spoil_gradient, trainer
from nsa.tests.maths import device
from nsa.train import checkpoint

HALTED, NONFINITE, PREEMPTED = 10, 11, 13
# Far below the norm of a first gradient, and of a part of one.
CLIP = 1e-3
# Under fp16 a scaler leaves out a step whose gradient overflows: only the loss ends the run.
CASES = [*((what, "fp32") for what in SPOILS), ("loss nan", "fp16")]


@pytest.mark.parametrize(("what", "precision"), CASES)
def test_training_stops_at_a_number_that_is_not_finite(
    tmp_path: Path, what: str, precision: str
) -> None:
    """After that step, on CUDA one later; its name is told, and nothing is saved from it on.

    Left out of its step, a micro-batch that the model cannot do would be trained around.
    """
    count = 2 if "micro-batch" in what else 1
    loop = trainer(tmp_path, f"train.accumulate_grad_batches={count}", precision=precision)
    SPOILS[what](loop)
    end = loop.run()
    told = rows(tmp_path, "training.csv")[SPOILED - 1]
    bad = "loss" if what.startswith("loss") else "grad_norm"
    assert not torch.tensor(told[bad]).isfinite(), f"nothing was spoiled: {told}"
    assert end.code == NONFINITE, f"it ended with {end.code} ({end.reason}) after step {loop.step}"
    assert f"step {SPOILED}:" in end.reason
    assert loop.step <= SPOILED + (device().type == "cuda")
    assert kept(tmp_path) == list(range(1, SPOILED))


@pytest.mark.topic("overflow")
def test_a_gradient_that_overflows_in_fp16_updates_nothing(tmp_path: Path) -> None:
    """The step is left out; training goes on with those after it."""
    loop = trainer(tmp_path, precision="fp16")
    spoil_gradient(loop, torch.inf)
    moved: list[bool] = []
    update = loop.engine.update

    def watched(*words: Any) -> float:
        before = [p.detach().clone() for p in loop.engine.model.parameters()]
        rate = update(*words)
        after = loop.engine.model.parameters()
        moved.append(any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)))
        return rate

    loop.engine.update = watched  # type: ignore[method-assign]
    end = loop.run()
    assert end.code == SUCCESS, end.reason
    assert moved == [step != SPOILED for step in range(1, STEPS + 1)]


@pytest.mark.topic("clipping")
@pytest.mark.parametrize("count", [1, 2], ids=("one batch", "two micro-batches"))
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_gradient_of_a_whole_step_is_clipped_by_its_norm(
    tmp_path: Path, precision: str, count: int
) -> None:
    """Not one micro-batch's before the others are added, nor by a norm with fp16's scale in it."""
    words = ("train.steps=1", f"train.accumulate_grad_batches={count}", f"train.grad_clip={CLIP}")
    loop = trainer(tmp_path, *words, precision=precision)
    wanted, found = Tensor(), Tensor()
    compute = loop.engine.compute

    def watched(batches: list[Batch], *words: Any) -> StepOutcome:
        nonlocal wanted, found
        model = loop.engine.model
        wanted = mean_gradient(model, [batch.on(loop.engine.device) for batch in batches])
        outcome = compute(batches, *words)
        found = flat(p.grad for p in model.parameters() if p.grad is not None)
        return outcome

    loop.engine.compute = watched  # type: ignore[method-assign]
    assert loop.run().code == SUCCESS
    norm = float(wanted.norm())
    assert norm > 10 * CLIP, "nothing had to be clipped"
    assert rows(tmp_path, "training.csv")[0]["grad_norm"] == pytest.approx(norm, rel=0.02)
    assert float((found - wanted * CLIP / norm).norm()) < 0.02 * CLIP


@pytest.mark.topic("evaluations")
def test_an_evaluation_with_a_loss_that_is_no_number_has_none(tmp_path: Path) -> None:
    """Left out of the mean, a batch that the model cannot do would be hidden."""
    loop = trainer(
        tmp_path, "train.eval_every=3", "train.eval_batches=2", save_every=STEPS
    )  # fmt: skip
    seen: list[int] = []

    def hook(model: nn.Module, _inputs: Any, logits: Tensor) -> Tensor:
        if model.training:
            return logits
        seen.append(loop.step)
        return logits * torch.nan if len(seen) == 2 else logits

    loop.engine.model.register_forward_hook(hook)
    loop.run()
    first, *_ = rows(tmp_path, "val.csv")
    assert seen[:2] == [3, 3] and not torch.tensor(first["loss"]).isfinite(), first


@pytest.mark.topic("records")
@pytest.mark.parametrize(
    ("name", "words"),
    [("training.csv", b"\n3,"), ("heartbeat_rank0.jsonl", b'"step": 3')],
)
def test_a_record_that_cannot_be_written_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: bytes
) -> None:
    """Or nobody learns of what came after; the disk is full from step 3 on."""
    write = os.write

    def full(file: int, data: bytes) -> int:
        path = Path(f"/proc/self/fd/{file}").readlink()
        if path.name == name and words in b"\n" + bytes(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        trainer(tmp_path, save_every=STEPS).run()


@pytest.mark.topic("records")
def test_the_board_shows_what_the_tables_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorBoard's writer is told every number under its own name, at its own step."""
    shown: dict[tuple[str, int], float] = {}

    class Board:
        def add_scalar(self, name: str, value: float, step: int) -> None:
            shown[name, step] = value

        def flush(self) -> None:
            """Nothing waits."""

    monkeypatch.setattr("nsa.train.settle.open_board", lambda _: Board())
    loop = trainer(tmp_path, "train.eval_every=2", "train.eval_batches=1", board=True)
    assert loop.run().code == SUCCESS
    # Of each table, its columns by what the board calls them.
    tables = {
        "training": {name: name for name in ("loss", "lr", "toks_per_s", "grad_norm")},
        "val": {"val_loss": "loss"},
        "gates": {"gate_entropy": "entropy", "max_gate": "max_gate"},
    }
    found = {name: rows(tmp_path, f"{name}.csv", *tables[name].values()) for name in tables}
    wanted = {
        (shown_as, int(row["step"])): row[column]
        for name, columns in tables.items()
        for shown_as, column in columns.items()
        for row in found[name]
    }
    assert len(found["val"]) == STEPS // 2 and found["gates"]
    assert {place: shown.get(place) for place in wanted} == wanted


@pytest.mark.parametrize("spoiled", [0, 1])
@pytest.mark.parametrize("what", ["loss", "norm"])
def test_what_one_rank_sees_ends_all(
    monkeypatch: pytest.MonkeyPatch, spoiled: int, what: str
) -> None:
    """Two ranks tell their numbers one after the other; then both hear the sum."""
    told: list[Tensor] = []

    def tell(numbers: Tensor, **_: Any) -> None:
        told.append(numbers.clone())

    def hear(numbers: Tensor, **_: Any) -> None:
        numbers.copy_(torch.stack(told).sum(0))

    monkeypatch.setattr("torch.distributed.all_reduce", tell)
    for rank in range(2):
        posted(rank, {what} if rank == spoiled else set())
    monkeypatch.setattr("torch.distributed.all_reduce", hear)
    ends = [posted(rank, {what} if rank == spoiled else set()).read() for rank in range(2)]
    assert [end.nonfinite for end in ends] == [True, True]


def posted(rank: int, spoiled: Collection[str]) -> Posted:
    """What a rank of two tells about a step of which these numbers are not finite."""
    place = Place(rank=rank, local_rank=rank, world_size=2, nodes=1, from_torchrun=True)
    loss, norm = (
        torch.tensor(torch.nan if name in spoiled else 1.0, device=device())
        for name in ("loss", "norm")
    )
    return post(
        Ranks(place=place, device=device(), grouped=True),
        loss=loss,
        norm=norm,
        strict_norm=True,
        halt=False,
        terminate=False,
        saved=False,
    )


@pytest.mark.topic("stopping")
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("what", ["halt file", "SIGTERM"])
def test_training_ends_with_the_step_in_which_it_is_told_to_and_saves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, rank: int
) -> None:
    """With the next one at the latest, and on CUDA one later. A step may take as long as four."""
    monkeypatch.setattr(numbers.Mark, "seconds", lambda _: 30.0)
    loop = trainer(tmp_path, save_every=STEPS)
    place = Place(rank=rank, local_rank=0, world_size=1, nodes=1, from_torchrun=False)
    loop.ranks = Ranks(place=place, device=device(), grouped=False)

    def hook(*_: Any) -> None:
        if loop.step != 2:
            return
        if what == "halt file":
            (tmp_path / ".HALT").touch()
        else:
            loop.termination._note(signal.SIGTERM, None)

    loop.engine.model.register_forward_hook(hook)
    end = loop.run()
    assert end.code == (HALTED if what == "halt file" else PREEMPTED), end
    assert loop.step <= 3 + (device().type == "cuda"), f"it went on to step {loop.step}"
    assert kept(tmp_path) == [loop.step]
    assert loop.termination.grace_s == 4 * 30.0


@pytest.mark.topic("stopping")
def test_a_rank_takes_the_signals_of_its_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two end it in an orderly way, one shows stacks, and it does not outlive who started it."""
    taken: dict[int, Any] = {}
    asked: list[tuple[int, ...]] = []
    libc = SimpleNamespace(prctl=lambda *words: asked.append(words) or 0)
    monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: libc)
    shown = list[int]()
    monkeypatch.setattr("faulthandler.register", lambda number, **_: shown.append(number))
    monkeypatch.setattr("signal.signal", lambda number, do: taken.update({number: do}))
    pipes: list[int] = []
    monkeypatch.setattr("signal.set_wakeup_fd", lambda pipe, **_: pipes.append(pipe))
    ended: SimpleQueue[str] = SimpleQueue()

    def ending(reason: str) -> None:
        ended.put(reason)
        threading.Event().wait()  # in place of ending this process, too

    for number in (signal.SIGTERM, signal.SIGINT):
        termination = take_signals({"TORCHELASTIC_RUN_ID": "one"})
        taken[number](number, None)
        assert termination.reason == number.name
        # Before the first step there is nothing to wait for.
        termination.on_forced_exit = ending
        os.write(pipes[-1], bytes([number]))
        assert ended.get(timeout=30) == f"{number.name} before the first step"
    assert signal.SIGUSR1 in shown and signal.SIGUSR1 not in taken
    assert {words[:2] for words in asked} == {(1, signal.SIGKILL)}


@pytest.mark.topic("stopping")
def test_a_rank_that_is_asked_writes_where_it_stands(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, signal; from nsa.launch.process import open_stackdump\n"
        "open_stackdump(pathlib.Path(), 0); os.kill(os.getpid(), signal.SIGUSR1)"
    )
    path = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", code]
    subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, check=True)
    (file,) = tmp_path.iterdir()
    assert 'File "<string>", line 2 in <module>' in file.read_text()


@torch.no_grad()
@pytest.mark.topic("unseen")
def test_ranks_know_each_other_by_every_parameter() -> None:
    """Those that parted in a norm or a bias alone would go on unnoticed."""
    model = nn.Sequential(nn.Linear(3, 2), nn.RMSNorm(2))
    known = {parameter_hash(model)}
    for parameter in model.parameters():
        parameter.view(-1)[-1] += 1.0
        known.add(parameter_hash(model))
    assert len(known) == 4


@pytest.mark.topic("stopping")
def test_the_last_save_may_take_longer_than_the_grace_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a step has to be over by then: a save that is cut off loses all since the one before."""
    loop = trainer(tmp_path, save_every=STEPS)
    write, overdue = checkpoint._Writer.write_data, []

    def cut_off(reason: str) -> None:
        raise RuntimeError(f"the save was cut off: {reason}")

    def late(self: Any, *words: Any) -> Any:
        overdue.append(loop.step)
        loop.termination._overdue("SIGTERM")
        return write(self, *words)

    monkeypatch.setattr(checkpoint._Writer, "write_data", late)
    loop.termination.on_forced_exit = cut_off
    loop.engine.model.register_forward_hook(
        lambda *_: loop.termination._note(signal.SIGTERM, None) if loop.step == 2 else None
    )
    assert loop.run().code == PREEMPTED
    assert overdue == kept(tmp_path) == [loop.step]


@pytest.mark.topic("records")
def test_a_step_is_timed_by_a_clock_that_nobody_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of day jumps by an hour at every look, as a copy of the module finds it."""
    jumps = count(0.0, 3600.0)
    monkeypatch.setattr(time, "time", lambda: next(jumps))
    spec = spec_from_file_location("timed", numbers.__file__)
    assert spec is not None and spec.loader is not None
    copy = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "timed", copy)
    spec.loader.exec_module(copy)
    timed = copy.StepClock(torch.device("cpu"))
    with timed.fetching():
        pass
    mark = timed.tick()
    assert 0 <= mark.fetch_s <= mark.seconds() < 60
