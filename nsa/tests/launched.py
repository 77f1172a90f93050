"""A whole launch in this process, on one rank, of a small model, and what its run directory holds.

The model attends to two blocks. Or the trainer's own loop alone, whose numbers are spoiled from
outside.
"""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nsa.contract import CHECKSUMS_JSON
from nsa.data import open_source
from nsa.launch.output import Heartbeat
from nsa.launch.plan import plan_launch
from nsa.launch.process import Termination
from nsa.launch.ranks import choose_device, start_ranks
from nsa.step.engine import Engine
from nsa.tests.built import BATCHED, as_typed, write_config
from nsa.train.loop import Loop
from nsa.train.session import train

# Three: what is right with two shows.
STEPS, MICRO_BATCHES = 6, 3
# The middle one of the checkpoints.
SAVED, MIDDLE, LAST = 3, "checkpoints/step_3", f"checkpoints/step_{STEPS}"
# Attention is proven elsewhere: two selection blocks are enough to train on.
SEQ_LEN = 16
SUCCESS = 0
PATIENCE_S = 60.0


def launch(
    folder: Path,
    *words: str,
    save_every: int = 1,
    precision: str = "fp32",
    variables: Mapping[str, str] = BATCHED,
    code: int = SUCCESS,
    case: str = "avg, tied head",
) -> tuple[Path, dict[str, Any]]:
    """A launch of so many steps, each of so many micro-batches, which ends with `code`.

    Returns its run directory, and what its exit event says.
    """
    folder.mkdir()
    file = write_config(case, folder, steps=STEPS, seq_len=SEQ_LEN, precision=precision)
    settings = (
        f"train.save_every={save_every}",
        "train.eval_every=2",
        "train.eval_batches=1",
        f"train.accumulate_grad_batches={MICRO_BATCHES}",
    )
    flags = ["--ddp", "0", "--dataset", "markov", "--out-dir", str(folder / "runs"), *words]
    plan = plan_launch(["--config", str(file), *flags, *as_typed(settings)], variables)
    ended = train(plan, Termination())
    (run_dir,) = (folder / "runs").glob("[!l]*")
    last = json.loads((run_dir / "heartbeat_rank0.jsonl").read_text().splitlines()[-1])
    assert ended == code, last
    return run_dir, last


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A launch of all steps."""
    return launch(tmp_path_factory.mktemp("whole") / "run")


def rows(folder: Path, name: str, *columns: str) -> list[dict[str, float]]:
    """The rows of a table of the run: these columns, or those of what was trained."""
    wanted = ("step", *(columns or ("loss", "grad_norm", "lr")))
    with (folder / name).open(newline="") as file:
        return [
            {key: float(row[key]) for key in wanted if key in row} for row in csv.DictReader(file)
        ]


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    """What rank 0 has told of this kind, but for a line that is not whole yet."""
    *lines, _ = (folder / "heartbeat_rank0.jsonl").read_text().split("\n")
    return [one for one in map(json.loads, lines) if one["event"] == name]


def kept(folder: Path) -> list[int]:
    """The steps of the checkpoints that are there."""
    return sorted(
        int(path.name.removeprefix("step_")) for path in folder.glob("checkpoints/step_*")
    )


def facts_of(folder: Path) -> dict[str, Any]:
    """What a checkpoint tells of itself."""
    facts: dict[str, Any] = json.loads((folder / CHECKSUMS_JSON).read_text())
    return facts


def tell(folder: Path, **facts: Any) -> None:
    """Have a checkpoint tell something else of itself."""
    (folder / CHECKSUMS_JSON).write_text(json.dumps(facts_of(folder) | facts))


def copied(folder: Path, into: Path, *steps: int) -> Path:
    """A run with these of its checkpoints alone."""
    for step in steps:
        shutil.copytree(folder / f"checkpoints/step_{step}", into / f"checkpoints/step_{step}")
    return into


def wait_for_step(folder: Path, step: int) -> None:
    """Until the heartbeats of the run in `folder` tell this step's end. Raises TimeoutError."""
    begin = monotonic()
    while monotonic() < begin + PATIENCE_S:
        for path in folder.glob("runs/2*/heartbeat_rank0.jsonl"):
            if any(one["step"] == step for one in events(path.parent, "step_end")):
                return
        sleep(0.01)
    raise TimeoutError(f"training did not come to step {step} while a save was under way")


SPOILED = 3
# Far from what fp16 overflows at by itself.
SCALED = {**BATCHED, "NSA_SCALER_INIT_SCALE": "256"}


def trainer(
    folder: Path,
    *settings: str,
    precision: str = "fp32",
    save_every: int = 1,
    layers: int = 1,
    board: bool = False,
) -> Loop:
    """The loop of a new run of so many steps, in `folder`; a checkpoint after each, or so many.

    One layer is enough: what ends a run, and what it keeps, does not depend on their number.
    """
    file = write_config("avg, tied head", folder, steps=STEPS, seq_len=SEQ_LEN, precision=precision)
    usual = (f"model.n_layers={layers}", f"train.save_every={save_every}", "train.grad_clip=1.0")
    # Of two values of a key the asked one.
    asked = {setting.partition("=")[0]: setting for setting in (*usual, *settings)}
    words = ["--config", str(file), "--ddp", "0", *as_typed(asked.values())]
    plan = plan_launch(words, {**SCALED, "NSA_TB_DISABLE": str(int(not board))})
    ranks = start_ranks(plan, choose_device(plan))
    beat = Heartbeat(rank=0, token="5afe")
    beat.open(folder)
    return Loop(
        Engine(plan, ranks),
        source=open_source(plan.config.data, plan.share),
        heartbeat=beat,
        termination=Termination(),
        run_dir=folder,
    )


def spoil_gradient(loop: Loop, value: float) -> None:
    """In one step the gradient of the first parameter is not finite; the loss is."""
    first = next(loop.engine.model.parameters())
    first.register_hook(lambda grad: grad * value if loop.step == SPOILED else grad)


def spoil_logits(loop: Loop, change: Callable[[Tensor], Tensor]) -> None:
    """In one step logits, and so the loss, are others."""

    def hook(_model: nn.Module, _inputs: Any, logits: Tensor) -> Tensor:
        return change(logits) if loop.step == SPOILED else logits

    loop.engine.model.register_forward_hook(hook)


def spoil_first_micro_batch(loop: Loop) -> None:
    """In one step the loss of the first micro-batch of two is not a number, that of the last is."""
    seen: list[int] = []

    def hook(_model: nn.Module, _inputs: Any, logits: Tensor) -> Tensor:
        seen.append(loop.step)
        return logits * torch.nan if seen.count(SPOILED) == 1 == len(seen) % 2 else logits

    loop.engine.model.register_forward_hook(hook)


def only_token_0(logits: Tensor) -> Tensor:
    """Every other token is impossible: the loss is infinite."""
    others = torch.zeros_like(logits)
    others[..., 1:] = -torch.inf
    return logits + others


SPOILS: dict[str, Callable[[Loop], None]] = {
    "loss nan": lambda loop: spoil_logits(loop, lambda logits: logits * torch.nan),
    "loss nan of one micro-batch": spoil_first_micro_batch,
    "loss inf": lambda loop: spoil_logits(loop, only_token_0),
    "gradient nan": lambda loop: spoil_gradient(loop, torch.nan),
    "gradient inf": lambda loop: spoil_gradient(loop, torch.inf),
}
