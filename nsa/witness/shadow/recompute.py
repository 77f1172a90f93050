"""Loss and gradient of a step once more, past all that the step sends them through.

The optimizer's shadow holds an update against the gradient that the optimizer had. Here the same
micro-batches go through the bare model again, before the step: without DDP and its hook, by the
cross entropy itself, through autograd and not into `.grad`. What the step makes of them has to be
the same, on the elements that the shadow samples and in sums of all of them. Hooks that hang on the
parameters are past, too: what the step sees is a view of each. A rank that is wrong in the layers
themselves agrees with itself, so once all ranks send one common micro-batch through, and have to
agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from nsa.data import Batch
from nsa.rounding import rms
from nsa.step.engine import Engine
from nsa.witness.oracle_check import OracleCheck
from nsa.witness.shadow.sample import Sample


@dataclass(frozen=True, kw_only=True)
class Recomputed:
    """What one step has to come to, on the device, as means over ranks and micro-batches.

    gradient, size: sampled elements, and their absolute values on each rank. scale: what the
    gradient scaler makes of the loss, and so of `gradient`. least: what the wire's type holds at
    its full precision. gates: `branch_use` of every layer [n_layers, 5] in the last micro-batch, on
    this rank. apart: how far this rank's gradient of a common micro-batch is from the ranks' mean,
    as `gap` says; None where that was not asked.
    """

    loss: Tensor
    gradient: Tensor
    size: Tensor
    scale: float
    least: float
    gates: Tensor
    apart: Tensor | None


def recompute(
    engine: Engine,
    batches: Sequence[Batch],
    sample: Sample,
    *,
    from_host: int = 0,
    together: int | None = None,
) -> Recomputed:
    """The step's loss and the sampled elements of its gradient. A collective of all ranks.

    from_host: so many passes of the step run by the modules, so these do too: a library may
    multiply otherwise in a replay, and other roundings choose other blocks, which changes the
    gradients of their keys by percents. together: hold the ranks against each other too, by groups
    of so many elements. Leaves no gradient.
    """
    scale = float(engine.scaler.get_scale())
    share_of = partial(_share, engine, sample, count=len(batches), scale=scale)
    engine.model.run_from_host(from_host)
    losses, shares = zip(*(share_of(batch.on(engine.device)) for batch in batches), strict=True)
    total, gradient = (reduce(torch.add, parts) for parts in (losses, shares))
    kept = [one.last_gates for one in engine.model.attentions()]
    gates = torch.stack([branch_use(gates) for gates in kept if gates is not None])
    told = torch.cat([total[None].double(), *_with_size(gradient)])
    mean = engine.ranks.mean(told)
    count = len(gradient)
    wire = engine.wrapped.wire if engine.wrapped is not None else None
    return Recomputed(
        loss=mean[0],
        gradient=mean[1 : 1 + count],
        size=mean[1 + count :],
        scale=scale,
        least=torch.finfo(wire.wire_dtype if wire else torch.float32).tiny,
        gates=gates,
        apart=None if together is None else _apart(engine, share_of, batches[0].tokens, together),
    )


def _share(
    engine: Engine, sample: Sample, tokens: Tensor, *, count: int, scale: float
) -> tuple[Tensor, Tensor]:
    """A micro-batch's share, of so many, of the step's loss and of its sampled gradient."""
    named = dict(engine.model.named_parameters())
    leaves: dict[str, Tensor] = {}
    # A recording or a compilation knows the parameters themselves.
    if not engine.holds_parameters:
        # Tensors of the same memory: nobody hung a hook on these.
        leaves = {n: p.detach().requires_grad_(p.requires_grad) for n, p in named.items()}
    own = {named[name]: leaf for name, leaf in leaves.items()}
    loss = _loss(engine, tokens, leaves) / count
    wanted = [own.get(p, p) for p in sample.parameters]
    found = torch.autograd.grad(loss * scale, wanted, allow_unused=True)
    return loss.detach(), sample.gradient(found)


def _apart(
    engine: Engine, share_of: Callable[[Tensor], tuple[Tensor, Tensor]], tokens: Tensor, size: int
) -> Tensor:
    """How far this rank's gradient of rank 0's micro-batch is from the mean of all ranks'."""
    ranks = engine.ranks
    if ranks.world_size == 1:
        return torch.zeros((), dtype=torch.float64)
    _, own = share_of(ranks.tensor_of_rank0(tokens.to(engine.device)))
    mean, sizes = ranks.mean(torch.cat(_with_size(own))).chunk(2)
    return _furthest(own, mean, sizes, size, least=torch.finfo(torch.float32).tiny)


def _with_size(gradient: Tensor) -> list[Tensor]:
    """A gradient and its absolute values, whose mean no signs cancel."""
    return [gradient.double(), gradient.double().abs()]


def gap(again: Recomputed, gradient: Tensor, together: int) -> float:
    """How far a step's sampled gradient is from what it has to be, of the group furthest off.

    A group is `together` elements that follow each other; root mean squares, as a share of the
    ranks' own gradients. NaN where a gradient is not finite.
    """
    return float(_furthest(gradient, again.gradient, again.size, together, least=again.least))


def bias(steps: Sequence[tuple[Recomputed, Tensor]]) -> dict[str, float]:
    """By which share the gradients of some steps are too near to 0, and too low.

    From their errors e, and what they have to be, w, both as shares of the mean size of the ranks'
    own: rounded to nearest, e is 0 on average. `weight`: the sum of w^2 over the elements. A step:
    what it has to come to, and the elements that its reduced gradient begins with.
    """
    e = w = torch.zeros(0, dtype=torch.float64)
    for again, gradient in steps:
        size, wanted = (x[: len(gradient)].double().cpu() for x in (again.size, again.gradient))
        # Below `least` a type has fewer digits, and in the end none.
        seen = size > again.least
        right = wanted[seen] / size[seen]
        w = torch.cat((w, right))
        e = torch.cat((e, gradient.double().cpu()[seen] / size[seen] - right))
    weight = float(w.square().sum())
    return {
        "toward_zero": -float((e * w).sum()) / weight if weight else 0.0,
        "down": -float(e.mean()) if len(e) else 0.0,
        "weight": weight,
    }


def _furthest(
    found: Tensor, wanted: Tensor, size: Tensor, together: int, *, least: float
) -> Tensor:
    off, whole = (rms(x.view(-1, together)) for x in (found.double() - wanted, size))
    return (off / (whole + least)).max()


def branch_use(gates: Tensor) -> Tensor:
    """How a layer's gates [..., 3] use the branches: entropy over ln 3, largest share, the shares.

    Means over tokens and heads, float64 [5]. With shares g / T of the sum T, the entropy is
    ln T - sum(g ln g) / T.
    """
    g = gates.double().reshape(-1, 3)
    total = g.sum(1).clamp_min(1e-12)
    entropy = (torch.special.entr(g).sum(1) + g.sum(1) * total.log()) / total / math.log(3)
    use = torch.stack((entropy, g.max(1).values / total, *(g / total[:, None]).unbind(1)))
    return use.mean(1)


def step_off(
    engine: Engine, batch: Batch, seed: int, *, values: bool, slope: bool
) -> dict[str, float]:
    """What `OracleCheck.step_errors` says of a pass over this batch.

    Layer, row and positions are drawn by the seed.
    """
    rows, layers = len(batch.tokens), engine.model.cfg.n_layers
    check = OracleCheck(
        model=engine.model,
        row=seed % rows,
        seed=seed,
        within=engine.autocast,
        only=seed // rows % layers,
    )
    engine.model.run_from_host()
    with torch.no_grad(), engine.autocast(), check.watch():
        engine.model(batch.on(engine.device)[:, :-1])
    return check.step_errors(values=values, slope=slope)


def loss_again(engine: Engine, tokens: Tensor) -> float:
    """Mean next-token loss in nats of tokens [B, S+1], by the modules as they train."""
    engine.model.run_from_host()
    with torch.enable_grad():
        return float(_loss(engine, tokens.to(engine.device)).detach())


def _loss(engine: Engine, tokens: Tensor, leaves: Mapping[str, Tensor] | None = None) -> Tensor:
    """leaves: in the place of the parameters of these names."""
    with engine.autocast():
        if leaves:
            logits: Tensor = functional_call(engine.model, dict(leaves), (tokens[:, :-1],))
        else:
            logits = engine.model(tokens[:, :-1])
    return cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
