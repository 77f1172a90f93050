"""An evaluation: the loss of every held-out batch, and that of a drawn one by another way."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.train.engine import Engine
from nsa.train.recompute import loss_again


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A batch that was computed a second time, counted from 0, and what that gave, in nats."""

    batch: int
    loss: float


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What an evaluation came to, in nats: a mean over ranks and batches, this rank's batches."""

    loss: float
    losses: list[float]
    again: Drawn | None


def evaluate(engine: Engine, batches: Iterable[Tensor], *, drawn: int) -> Evaluation:
    """Next-token losses of these batches [B, S+1]; `drawn`: which one to compute again.

    A collective of all ranks.
    """
    losses: list[float] = []
    kept: Tensor | None = None
    engine.model.eval()
    with torch.no_grad():
        for number, tokens in enumerate(batches):
            losses.append(float(engine.loss(tokens.to(engine.device), wrapped=False)))
            kept = tokens if number == drawn else kept
    engine.model.train()
    total, count = engine.ranks.sum([sum(losses), float(len(losses))])
    return Evaluation(
        loss=total / count,
        losses=losses,
        again=None if kept is None else Drawn(batch=drawn, loss=loss_again(engine, kept)),
    )
