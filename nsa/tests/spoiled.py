"""The trainer's own loop over a small model, and numbers of it that are spoiled from outside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nsa.data.packing import open_source
from nsa.launch.output import Heartbeat
from nsa.launch.plan import plan_launch
from nsa.launch.process import Termination
from nsa.launch.ranks import choose_device, start_ranks
from nsa.step.engine import Engine
from nsa.tests.built import BATCHED, as_typed, write_config
from nsa.tests.launched import SEQ_LEN, STEPS
from nsa.train.loop import Loop
from nsa.train.settle import Tables

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
    plan = plan_launch(words, SCALED)
    ranks = start_ranks(plan, choose_device(plan))
    beat = Heartbeat(rank=0, token="5afe")
    beat.open(folder)
    return Loop(
        Engine(plan, ranks),
        source=open_source(plan.config.data, plan.share),
        tables=Tables(folder, rank=0, csv=True, aux=True, board=board),
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
    "loss inf": lambda loop: spoil_logits(loop, only_token_0),
    "gradient nan": lambda loop: spoil_gradient(loop, torch.nan),
    "gradient inf": lambda loop: spoil_gradient(loop, torch.inf),
}
