"""Loss and gradient of a step once more, past all that the step sends them through.

The optimizer's shadow holds an update against the gradient that the optimizer had. Here the same
micro-batches go through the bare model again, before the step: without DDP and its hook, by the
cross entropy itself, through autograd and not into `.grad`. What the step makes of them has to be
the same, on the elements that the shadow samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from nsa.data.source import Batch
from nsa.train import compiled
from nsa.train.engine import Engine

# Gradients of so many elements, 64 MiB in float32, are made at once: the largest parameters of a
# large model take turns from step to step.
_MOST_ELEMENTS = 1 << 24

Sample = Callable[[Sequence[Tensor | None]], Tensor]


@dataclass(frozen=True, kw_only=True)
class Recomputed:
    """What one step has to come to, on the device, as means over ranks and micro-batches.

    gradient, size: sampled elements, and their absolute values on each rank. asked: of which
    parameters. scale: what the gradient scaler makes of the loss, and so of `gradient`. least:
    what the wire's type holds at its full precision.
    """

    loss: Tensor
    gradient: Tensor
    size: Tensor
    asked: list[bool]
    scale: float
    least: float


def recompute(
    engine: Engine,
    batches: Sequence[Batch],
    parameters: Sequence[nn.Parameter],
    *,
    sample: Sample,
    seed: int,
) -> Recomputed:
    """The step's loss and the sampled elements of its gradient. A collective of all ranks.

    seed: draws the parameters where they are too many for one time. Leaves no gradient.
    """
    asked = _drawn(parameters, seed)
    chosen = [p for p, wanted in zip(parameters, asked, strict=True) if wanted]
    scaler = engine.scaler
    scale = float(scaler.get_scale()) if scaler.is_enabled() else 1.0
    total, gradient = torch.zeros((), device=engine.device), sample([None] * len(parameters))
    for batch in batches:
        tokens = batch.tokens.to(engine.device, non_blocking=True)
        loss = _loss(engine, tokens) / len(batches)
        found = iter(torch.autograd.grad(loss * scale, chosen, allow_unused=True))
        gradient = gradient + sample([next(found) if wanted else None for wanted in asked])
        total = total + loss.detach()
    told = torch.cat([total[None].double(), gradient.double(), gradient.double().abs()])
    mean = engine.ranks.mean(told)
    count = len(gradient)
    wire = engine.wrapped.wire if engine.wrapped is not None else None
    return Recomputed(
        loss=mean[0],
        gradient=mean[1 : 1 + count],
        size=mean[1 + count :],
        asked=asked,
        scale=scale,
        least=torch.finfo(wire.wire_dtype if wire else torch.float32).tiny,
    )


def gap(again: Recomputed, gradient: Tensor, together: int) -> float:
    """How far a step's sampled gradient is from what it has to be, of the group furthest off.

    A group is `together` elements that follow each other; root mean squares, as a share of the
    ranks' own gradients. NaN where a gradient is not finite.
    """
    off = (gradient.double() - again.gradient).view(-1, together).square().mean(1).sqrt()
    size = again.size.view(-1, together).square().mean(1).sqrt()
    shares = off / (size + again.least)
    return float(shares.max()) if len(shares) else 0.0


def _loss(engine: Engine, tokens: Tensor) -> Tensor:
    if engine.compiled_graphs:
        compiled.begin_micro_batch()
    with engine.autocast():
        logits: Tensor = engine.model(tokens[:, :-1])
    return cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def _drawn(parameters: Sequence[nn.Parameter], seed: int) -> list[bool]:
    """Which parameters are asked for: one at least, and as many as fit."""
    generator = torch.Generator().manual_seed(seed)
    asked, left = [False] * len(parameters), _MOST_ELEMENTS
    for number in torch.randperm(len(parameters), generator=generator).tolist():
        size = parameters[number].numel()
        if size <= left or not any(asked):
            asked[number], left = True, left - size
    return asked
