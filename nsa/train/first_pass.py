"""One pass over the launch's first batch that proves what no later number shows.

Before the first step every rank runs its real batch forward and backward through the real wrapper
and hook, with known numbers in the place of its gradients. What comes out of the reduction tells
whether every rank's share arrives, and how many bits of it. On the way the pass notes which
parameters got a gradient of their own and for how many positions the loss was taken, and rank 0
holds what the model computed against the oracle.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nsa.data.source import Batch
from nsa.train.accounts import Piece, least_by_group, pieces, plain_floats
from nsa.train.engine import Engine
from nsa.train.spot_check import SpotCheck

# Each rank r sends (r + 1) times these: the second survives fp16 and fp32 but not bf16, whose
# steps are 2^-7 at 1; the third survives fp32 only.
_FINE = (0.0, 2.0**-9, 2.0**-14)
# A difference has survived if it comes out within this share of itself.
_SURVIVED = 0.1


@dataclass(kw_only=True)
class _Seen:
    """What the hooks of the pass noted."""

    local: list[tuple[Piece, Tensor]] = field(default_factory=list)
    positions: Tensor | None = None
    logits: Tensor | None = None


def first_pass(engine: Engine, batch: Batch) -> dict[str, Any]:
    """Run the pass; the fields of the `proof` event. A collective of all ranks.

    Leaves no gradient, changes no parameter and does not touch the optimizer.
    """
    seen = _Seen()
    by_parameter: dict[int, list[Piece]] = {}
    for piece in pieces(engine.model):
        by_parameter.setdefault(id(piece.parameter), []).append(piece)
    weight = float(engine.ranks.rank + 1)
    handles = [
        group[0].parameter.register_hook(partial(_swap, seen, group, weight))  # type: ignore[no-untyped-call]
        for group in by_parameter.values()
        if group[0].parameter.requires_grad
    ]
    handles.append(engine.model.head.register_forward_hook(_counting(seen)))
    spots = SpotCheck(model=engine.model) if engine.ranks.rank == 0 else None
    try:
        with spots.watch() if spots else nullcontext():
            loss = engine.loss(batch.tokens.to(engine.device))
        engine.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
    finally:
        for handle in handles:
            handle.remove()
    arrived = _arrived(engine)
    engine.optimizer.zero_grad(set_to_none=True)
    if engine.wrapped is not None and engine.wrapped.wire is not None:
        engine.wrapped.wire.take()
    return {
        "loss": float(loss.detach()),
        "loss_again": _mean_surprise(seen.logits, batch.tokens),
        "positions": 0 if seen.positions is None else int(seen.positions),
        "own_gradient": plain_floats(least_by_group([(p, float(v)) for p, v in seen.local])),
        **arrived,
        "oracle": spots.result() if spots else None,
    }


def _swap(seen: _Seen, group: list[Piece], weight: float, gradient: Tensor) -> Tensor:
    """Note a parameter's own gradient, and hand on the known numbers instead."""
    for piece in group:
        seen.local.append((piece, piece.of(gradient).float().square().mean().sqrt()))
    return weight * _pattern(gradient)


def _pattern(like: Tensor) -> Tensor:
    fine = torch.tensor(_FINE, dtype=like.dtype, device=like.device)
    repeated = fine.repeat(-(-like.numel() // len(_FINE)))[: like.numel()]
    return (1.0 + repeated).view(like.shape)


def _counting(seen: _Seen) -> Callable[[nn.Module, Any, Tensor], None]:
    """A forward hook that keeps the logits and counts the positions that get a gradient."""

    def count(gradient: Tensor) -> None:
        seen.positions = gradient.ne(0).any(-1).sum()

    def hook(_module: nn.Module, _inputs: Any, logits: Tensor) -> None:
        seen.logits = logits.detach()
        logits.register_hook(count)  # type: ignore[no-untyped-call]

    return hook


def _mean_surprise(logits: Tensor | None, tokens: Tensor) -> float | None:
    """Mean of ln(sum(exp(z))) - z[next token] over logits [B,S,V] for tokens [B,S+1], in nats."""
    if logits is None or logits.shape[:2] != (tokens.shape[0], tokens.shape[1] - 1):
        return None
    z = logits.float()
    following = z.gather(-1, tokens[:, 1:, None].to(z.device))[..., 0]
    return float((z.logsumexp(-1) - following).mean())


def _arrived(engine: Engine) -> dict[str, Any]:
    """What the reduction made of the known numbers: their mean, and which details survived.

    mean_low, mean_high: the extremes over all elements, as multiples of what the mean of all
    ranks' numbers is. wire: the widest type in which the details could have traveled.
    """
    count = engine.ranks.world_size
    expected = sum(range(1, count + 1)) / count
    lows, highs, details = [], [], []
    missing = []
    for name, parameter in engine.model.named_parameters():
        if parameter.grad is None:
            missing.append(name)
            continue
        ratio = (parameter.grad.float() / expected).flatten()
        error = ratio - _pattern(ratio)
        lows.append(error.min())
        highs.append(error.max())
        plain = ratio[0 :: len(_FINE)].median()
        for number in (1, 2):
            part = ratio[number :: len(_FINE)]
            if part.numel():
                details.append((number, (part - plain).median() / _FINE[number]))
    survived = {number: _survived([v for n, v in details if n == number]) for number in (1, 2)}
    wire = "fp32" if survived[2] else "fp16" if survived[1] else "bf16"
    return {
        "mean_low": 1.0 + float(torch.stack(lows).min()) if lows else 0.0,
        "mean_high": 1.0 + float(torch.stack(highs).max()) if highs else 0.0,
        "wire": wire,
        "missing": missing,
    }


def _survived(shares: list[Tensor]) -> bool:
    """Did a detail come out at its own size in every parameter that holds it?"""
    return bool(shares) and all(abs(float(share) - 1) < _SURVIVED for share in shares)
