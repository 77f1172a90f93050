"""What the drawn steps come to once a launch is over: how far each was from what it had to be.

From the gradient, the config and its learning-rate schedule follows what an update had to give,
from the micro-batches what the gradient had to be (`recompute`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nsa.step.engine import Engine
from nsa.witness.shadow.recompute import Bias, Recomputed, gap
from nsa.witness.shadow.sample import (
    BETAS,
    EPS,
    SAMPLED,
    Begun,
    Sample,
    Seen,
    at_least_one,
    or_null,
    plain_floats,
)

# The update itself takes some ten roundings more than adding it to the weight does.
_UPDATE_ROUNDINGS = 16
# Squares of what is smaller than this underflow in float32, and are far below epsilon.
_FLOOR = 1e-30
# torch takes a norm that it clips for so much larger.
_CLIP_EPS = 1e-6
_ROUNDOFF = 2.0**-24


def worst(gaps: list[float]) -> float:
    """The largest; a NaN stays the worst."""
    return next((one for one in gaps if one != one), max(gaps))


class Updates:
    """The updates of the steps that were seen, held against AdamW's equation."""

    def __init__(self, engine: Engine, sample: Sample) -> None:
        self._engine, self._owner = engine, sample.owner
        # Matrices decay, nothing else does.
        decay = engine.plan.config.train.weight_decay
        self._decay = torch.tensor(
            [decay * (p.dim() >= 2) for p in sample.parameters], dtype=torch.float64
        )

    def gaps(self, steps: Mapping[int, Seen]) -> tuple[dict[str, float], int]:
        """The largest gap of each kind, and how much jumped from one step to the next."""
        found = dict.fromkeys(("weight", "first_moment", "second_moment", "norm"), 0.0)
        jumps = 0
        for step, seen in steps.items():
            gaps, wrong_counts = self._of_step(step, seen)
            found = {name: worst([found[name], gap]) for name, gap in gaps.items()}
            jumps += wrong_counts
            earlier = steps.get(step - 1)
            if earlier is not None:
                jumps += int((earlier.state.bits != seen.begun.state.bits).sum())
        return found, jumps

    def _of_step(self, step: int, seen: Seen) -> tuple[dict[str, float], int]:
        """The gaps of one step by name, and how many parameters count it otherwise than once."""
        begun = seen.begun
        norm, told = begun.true_norm(), float(seen.norm)
        rate = self._engine.rate(step)
        left_out = not moves(self._engine, begun)
        moving = torch.tensor(begun.has_gradient) & (not left_out)
        before, after = (s.values.double().cpu() for s in (begun.state, seen.state))
        was, now = (s.counts.double().cpu() for s in (begun.state, seen.state))
        limit = self._engine.plan.config.train.grad_clip
        clipped = min(1.0, limit / (told + _CLIP_EPS)) if limit else 1.0
        wanted, explained = updated(
            before,
            begun.gradient[: len(self._owner)].double().cpu() * (clipped / begun.scale),
            rate=rate,
            decay=self._decay[self._owner],
            count=now[self._owner],
        )
        idle = ~moving[self._owner]
        wanted[:, idle] = before[:, idle]
        off = (after - wanted).abs() / (_ROUNDOFF * explained)
        off[:, idle] = (after != before)[:, idle].double() / _ROUNDOFF
        gaps = dict(
            zip(("weight", "first_moment", "second_moment"), off.amax(1).tolist(), strict=True)
        )
        gaps["weight"] = worst([gaps["weight"], self._as_a_whole(seen, rate * moving)])
        gaps |= {"norm": 0.0 if left_out else abs(told / norm - 1) if norm else told}
        return gaps, int((now != was + moving).sum())

    def _as_a_whole(self, seen: Seen, rate: torch.Tensor) -> float:
        """How far the sums of all weights are from AdamW's with these moments, in roundoffs."""
        before, after, way, sizes = (
            x.cpu() for x in (seen.begun.state.sums, seen.state.sums, seen.way, seen.sizes)
        )
        counts = seen.state.counts.cpu()
        wanted, explained = moved(before, way, sizes, rate=rate, decay=self._decay, count=counts)
        return float(((after - wanted).abs() / (_ROUNDOFF * explained)).max())


def moves(engine: Engine, begun: Begun) -> bool:
    """Under a scaler, a step whose gradients are not finite is left out."""
    return not engine.scaler.is_enabled() or float(begun.norm) < float("inf")


def gradients(
    engine: Engine,
    sample: Sample,
    again: Mapping[int, Recomputed],
    steps: Mapping[int, Seen],
    off: Mapping[int, Mapping[str, float]],
) -> dict[str, Any]:
    """The steps computed twice, the losses that they had to have, the gradients' largest gap.

    off: by step, as `OracleCheck.step_errors` says. Of what is returned:

    `norms`: of the gradients as they were before clipping; null of one that is not finite.
    `gradient`: of a piece, or of a parameter's sums, in root mean squares, as a share of what the
    ranks' gradients are.
    seams, layers, logits, slopes: `off` by step, and not of the first; in half types seams alone.
    `ranks`: how far this rank is from all ranks' mean in the same micro-batch. `bias`: what the
    gradients' errors are on average, as `Bias` tells it. `gates`: of each step and layer what
    `branch_use` says; null on other ranks than 0, which writes gates.csv. Synchronizes.
    """
    gaps, apart, bias = [0.0], [0.0], Bias()
    ended = [step for step in again if step in steps]
    for step in ended:
        twice, begun = again[step], steps[step].begun
        asked = torch.tensor(twice.asked)[sample.owners]
        rescaled = begun.gradient.double() * (twice.scale / begun.scale)
        reduced = rescaled * asked.to(rescaled.device)
        # A step that the scaler leaves out has no gradient to hold.
        if moves(engine, begun):
            gaps.append(gap(twice, reduced, SAMPLED))
            # Of elements alone: sums are not rounded.
            bias = bias.with_step(twice, reduced[: len(sample.owner)])
            apart += [] if twice.apart is None else [float(twice.apart)]
    gates = [again[step].gates.tolist() for step in ended]
    return {
        "steps": ended,
        "losses": [float(again[step].loss) for step in ended],
        "norms": [or_null(steps[step].begun.true_norm()) for step in ended],
        **plain_floats({"gradient": worst(gaps), "ranks": worst(apart)}),
        "bias": plain_floats(bias.report()),
        "gates": gates if engine.ranks.rank == 0 else None,
        **{
            name: {
                step: or_null(errors[name])
                for step, errors in off.items()
                if step in ended and name in errors
            }
            for name in ("seams", "layers", "logits", "slopes")
        },
    }


def parted(engine: Engine, sample: Sample, steps: Mapping[int, Seen]) -> str:
    """Which parameters differ between the ranks, and since when, in words. A collective.

    Later on all of them do: each follows from the others.
    """
    ranks, device = engine.ranks, engine.device
    named = {id(parameter): name for name, parameter in engine.model.named_parameters()}
    one_each = torch.arange(len(sample.parameters), device=device)
    for step, seen in sorted(steps.items()):
        for what, own, of in (
            ("gradient", seen.begun.gradient, sample.owners.to(device)),
            ("weights", seen.state.bits[0], one_each),
        ):
            off = (own != ranks.tensor_of_rank0(own)).double()
            found = ranks.sum(torch.zeros_like(one_each).double().index_add(0, of, off).tolist())
            apart = [named[id(p)] for p, n in zip(sample.parameters, found, strict=True) if n]
            if apart:
                count = f"{len(apart)} of {len(found)} parameters"
                return f"seen first in step {step}: the {what} of {count}, first {apart[0]}"
    return "since the last update"


def updated(
    before: Tensor, gradient: Tensor, *, rate: float, decay: Tensor, count: Tensor
) -> tuple[Tensor, Tensor]:
    """Weight and moments [3, N] after an update, and the sizes that its roundings are shares of."""
    weight, first, second = before
    beta1, beta2 = BETAS
    first_new = beta1 * first + (1 - beta1) * gradient
    second_new = beta2 * second + (1 - beta2) * gradient.square()
    root = (second_new / (1 - beta2**count)).sqrt() + EPS
    way = rate / (1 - beta1**count)
    weight_new = weight * (1 - rate * decay) - way * first_new / root
    sizes = beta1 * first.abs() + (1 - beta1) * gradient.abs()
    explained = [weight.abs() + _UPDATE_ROUNDINGS * way * sizes / root, sizes, second_new]
    return torch.stack([weight_new, first_new, second_new]), torch.stack(explained) + _FLOOR


def moved(
    before: Tensor, way: Tensor, sizes: Tensor, *, rate: Tensor, decay: Tensor, count: Tensor
) -> tuple[Tensor, Tensor]:
    """Sums [P, n] of all weights after an update, and the sizes that roundings are shares of.

    before, way: sums of weights and of `way_of`. sizes [P, 2]: the root mean squares of `way_of`
    and of the weights. rate, decay, count: of each parameter [P].
    """
    share = rate / (1 - BETAS[0] ** at_least_one(count))
    wanted = before * (1 - rate * decay)[:, None] - way * share[:, None]
    explained = sizes[:, 1] + _UPDATE_ROUNDINGS * share * sizes[:, 0] + _FLOOR
    return wanted, explained[:, None]
