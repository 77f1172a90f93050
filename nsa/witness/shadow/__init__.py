"""A second optimizer beside the real one: what it looks at, and when.

At a few pairs of steps that the run's token draws, a sample of every piece of the parameters is
noted (`sample`): gradient as reduced and before it is clipped, weight and both moments before and
after the update. In some of these steps loss and gradient are computed a second time (`recompute`).
In between all has to rest (`Rest`). Nothing waits for the device before the run has ended: then
what was noted is held against what it had to be. An update follows from the gradient, the config
and its learning-rate schedule, a gradient from the micro-batches.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nsa.contract.digests import recomputed_steps, watched_steps
from nsa.data import Batch
from nsa.rounding import or_null, plain_floats
from nsa.step.engine import Engine
from nsa.witness.shadow import recompute
from nsa.witness.shadow.sample import (
    BETAS,
    EPS,
    SAMPLED,
    Begun,
    Sample,
    Seen,
    at_least_one,
)

# The update itself takes some ten roundings more than adding it to the weight does.
_UPDATE_ROUNDINGS = 16
# Squares of what is smaller than this underflow in float32, and are far below epsilon.
_FLOOR = 1e-30
# torch takes a norm that it clips for so much larger.
_CLIP_EPS = 1e-6
_ROUNDOFF = 2.0**-24
# Elements of a tensor that are looked at in every step.
_WINDOW = 1 << 16


class Shadow:
    """Watches the optimizer in the drawn steps of a launch that goes from `first` to `last`."""

    def __init__(self, engine: Engine, *, token: str, first: int, last: int) -> None:
        self._engine, self._seed = engine, _seed(token)
        self._watched = frozenset(watched_steps(token, first, last))
        profiled = engine.plan.flags.profile_steps > 0
        self.recomputed = frozenset(recomputed_steps(token, first, last, profiled=profiled))
        self._sample = Sample(engine, self._seed)
        self.rest = Rest(engine, self._sample, self._seed)
        # By the step.
        self._again: dict[int, recompute.Recomputed] = {}
        self._off: dict[int, dict[str, float]] = {}
        self._begun: dict[int, Begun] = {}
        self._seen: dict[int, Seen] = {}
        self._rate = 0.0

    def recompute(self, step: int, batches: Sequence[Batch], *, from_host: int = 0) -> None:
        """What the step that is about to begin has to make of these micro-batches. A collective.

        from_host: so many passes the modules will run themselves, whatever is recorded or compiled.
        """
        self._again[step] = recompute.recompute(
            self._engine,
            batches,
            self._sample,
            from_host=from_host,
            together=SAMPLED if step == min(self.recomputed) else None,
        )
        # The proof held the first batch.
        if step > min(self.recomputed):
            seed, begins = self._seed + step + self._engine.ranks.rank, step - 1
            # Of trained weights values have no bound in half types.
            values = self._engine.plan.config.runtime.precision == "fp32"
            slope = values and (begins not in self.recomputed or begins == min(self.recomputed))
            self._off[step] = recompute.step_off(
                self._engine, batches[0], seed, values=values, slope=slope
            )

    def watch(self, step: int) -> None:
        """A step begins. Right before its update look at what that begins with, and note the
        gradient before it is clipped, if the step is a drawn one.
        """
        drawn = step in self._watched
        self.rest.begins(drawn=drawn)

        def before_clipping() -> None:
            self.rest.before_update()
            if drawn:
                self._begun[step] = self._sample.begun()

        self._engine.before_clipping = before_clipping

    def updated(self, step: int, norm: Tensor) -> None:
        """The step's update is over; `norm`: of its gradients, as the trainer tells it."""
        every = self._engine.plan.config.train.eval_every
        self.rest.updated(evaluates=bool(every) and step % every == 0)
        # Numbers of the host: those of every step.
        rates = [float(group["lr"]) for group in self._engine.optimizer.param_groups]
        due = self._engine.rate(step)
        self._rate = _worst([self._rate, *(abs(own - due) / (due or 1.0) for own in rates)])
        if step in self._begun:
            self._seen[step] = self._sample.seen(self._begun.pop(step), norm)

    def report(self) -> dict[str, Any]:
        """The steps watched, and the largest gap of each kind. Synchronizes.

        `weight`, `first_moment`, `second_moment`: from AdamW's equation, in roundoffs of float32;
        `norm` and `rate`: from the true norm and, of all steps, from the schedule, as shares;
        `jumps`: weights and moments of parameters that were not before a step what they were after
        the one before, that changed where all has to rest, or that an evaluation had otherwise than
        the last update left them, and counts that did not go up by one; `left`: elements that had a
        gradient before the step's first backward pass.
        """
        gaps, jumps = _Updates(self._engine, self._sample).gaps(self._seen)
        told = plain_floats({**gaps, "rate": self._rate})
        rest = {"jumps": jumps + self.rest.jumps(), "left": self.rest.left()}
        return {"steps": list(self._seen), **told, **rest}

    def parted(self) -> str:
        """Which parameters differ between the ranks, and since when, in words. A collective.

        Later on all of them do: each follows from the others.
        """
        ranks, device, sample = self._engine.ranks, self._engine.device, self._sample
        named = {id(parameter): name for name, parameter in self._engine.model.named_parameters()}
        one_each = torch.arange(len(sample.parameters), device=device)
        none = torch.zeros(len(one_each), dtype=torch.float64, device=device)
        for step, seen in sorted(self._seen.items()):
            for what, own, of in (
                ("gradient", seen.begun.gradient, sample.owners.to(device)),
                ("weights", seen.state.bits[0], one_each),
            ):
                off = (own != ranks.tensor_of_rank0(own)).double()
                found = ranks.sum(none.index_add(0, of, off).tolist())
                off_by = {id(p): n for p, n in zip(sample.parameters, found, strict=True)}
                if apart := [name for one, name in named.items() if off_by.get(one)]:
                    count = f"{len(apart)} of {len(found)} parameters"
                    return f"seen first in step {step}: the {what} of {count}, first {apart[0]}"
        return "since the last update"

    def report_recomputed(self) -> dict[str, Any]:
        """The steps computed twice, the losses that they had to have, the gradients' largest gap.

        `norms`: of the gradients as they were before clipping; null of one that is not finite.
        `gradient`: of a piece, or of a parameter's sums, in root mean squares, as a share of what
        the ranks' gradients are.
        seams, layers, logits, slopes: by step, as `OracleCheck.step_errors` says, and not of the
        first; in half types seams alone.
        `ranks`: how far this rank is from all ranks' mean in the same micro-batch. `bias`: what the
        gradients' errors are on average, as `bias` tells it. `gates`: of each step and layer what
        `branch_use` says; null on other ranks than 0, which writes gates.csv. Synchronizes.
        """
        gaps, apart, held = [0.0], [0.0], []
        ended = [step for step in self._again if step in self._seen]
        for step in ended:
            twice, begun = self._again[step], self._seen[step].begun
            reduced = begun.gradient.double() * (twice.scale / begun.scale)
            # A step that the scaler leaves out has no gradient to hold.
            if _moves(self._engine, begun):
                gaps.append(recompute.gap(twice, reduced, SAMPLED))
                # Of elements alone: sums are not rounded.
                held.append((twice, reduced[: len(self._sample.owner)]))
                apart += [] if twice.apart is None else [float(twice.apart)]
        gates = [self._again[step].gates.tolist() for step in ended]
        return {
            "steps": ended,
            "losses": [float(self._again[step].loss) for step in ended],
            "norms": [or_null(self._seen[step].begun.true_norm()) for step in ended],
            **plain_floats({"gradient": _worst(gaps), "ranks": _worst(apart)}),
            "bias": plain_floats(recompute.bias(held)),
            "gates": gates if self._engine.ranks.rank == 0 else None,
            **{
                name: {
                    step: or_null(errors[name])
                    for step, errors in self._off.items()
                    if step in ended and name in errors
                }
                for name in ("seams", "layers", "logits", "slopes")
            },
        }


class _Updates:
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
            found = {name: _worst([found[name], gap]) for name, gap in gaps.items()}
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
        left_out = not _moves(self._engine, begun)
        moving = torch.tensor(begun.has_gradient) & (not left_out)
        before, after = (s.values.double().cpu() for s in (begun.state, seen.state))
        was, now = (s.counts.double().cpu() for s in (begun.state, seen.state))
        limit = self._engine.plan.config.train.grad_clip
        clipped = min(1.0, limit / (told + _CLIP_EPS)) if limit else 1.0
        wanted, explained = _updated(
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
        gaps["weight"] = _worst([gaps["weight"], self._as_a_whole(seen, rate * moving)])
        gaps |= {"norm": 0.0 if left_out else abs(told / norm - 1) if norm else told}
        return gaps, int((now != was + moving).sum())

    def _as_a_whole(self, seen: Seen, rate: Tensor) -> float:
        """How far the sums of all weights are from AdamW's with these moments, in roundoffs."""
        before, after, way, sizes = (
            x.cpu() for x in (seen.begun.state.sums, seen.state.sums, seen.way, seen.sizes)
        )
        counts = seen.state.counts.cpu()
        wanted, explained = _moved(before, way, sizes, rate=rate, decay=self._decay, count=counts)
        return float(((after - wanted).abs() / (_ROUNDOFF * explained)).max())


def _worst(gaps: list[float]) -> float:
    """The largest; a NaN stays the worst."""
    return next((one for one in gaps if one != one), max(gaps))


def _moves(engine: Engine, begun: Begun) -> bool:
    """Under a scaler, a step whose gradients are not finite is left out."""
    return not engine.scaler.is_enabled() or float(begun.norm) < float("inf")


def _updated(
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


def _moved(
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


def _seed(token: str) -> int:
    return int.from_bytes(hashlib.blake2b(token.encode(), digest_size=7).digest(), "little")


class Rest:
    """Looks whether what has to rest did; `seed` draws where a look at every step goes."""

    def __init__(self, engine: Engine, sample: Sample, seed: int) -> None:
        self._engine, self._sample = engine, sample
        self._windows = [
            _window(p.numel(), seed + number) for number, p in enumerate(sample.parameters)
        ]
        self._places: list[int] = []
        self._looked_at: list[Tensor] = []
        self._moved: list[Tensor] = []
        self._left: list[Tensor] = []
        # As the last update before an evaluation left them, or the checkpoint that is gone on from.
        self._updated = sample.bits(sample.parameters)
        # As the last update left weights and moments, and how many of these changed since.
        self._norms: Tensor | None = None
        self._changed = torch.zeros((), dtype=torch.int64, device=engine.device)
        # As an evaluation or the like left all, until the next step begins.
        self._resting: Tensor | None = None

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Around what has to leave all of this as it is: an evaluation, a save, other toggles.

        Weights and moments, gradients, which would be added to those of the next step, and the
        model's mode: in that of an evaluation nothing is replayed or recomputed. The next step has
        to begin with the same.
        """
        self._look_at_all()
        self._resting = self._all()
        yield
        self._look_at_all()
        self._resting = self._all()

    def evaluating(self) -> None:
        """A held-out batch is in the model, which has to hold what the last update left."""
        now = self._sample.bits(self._sample.parameters)
        self._moved.append((now != self._updated).sum())

    def begins(self, *, drawn: bool) -> None:
        """A step begins; in a drawn one no gradient may be there: its own would be added to it."""
        self._look_at_all()
        if drawn:
            grads = [p.grad for p in self._sample.parameters]
            self._left.append((self._sample.elements(grads) != 0).sum())

    def before_update(self) -> None:
        """Are weights and moments as the last update left them, right before the next one?"""
        if self._norms is not None:
            norms = self._window_norms()
            # What has lost its moments, or got some, has others.
            same = norms.shape == self._norms.shape
            self._changed = self._changed + ((norms != self._norms).sum() if same else 1)
            self._norms = None

    def updated(self, *, evaluates: bool) -> None:
        """An update is over; `evaluates`: an evaluation comes next."""
        if evaluates:
            self._updated = self._sample.bits(self._sample.parameters)
        self._norms = self._window_norms()

    def jumps(self) -> int:
        """Weights, moments and the like that changed where they had to rest. Synchronizes."""
        return int(self._changed) + sum(int(moved) for moved in self._moved)

    def left(self) -> int:
        """Elements that had a gradient before a step's first backward pass. Synchronizes."""
        return sum(int(found) for found in self._left)

    def _look_at_all(self) -> None:
        """Is all as it was left, if it had to rest until now?"""
        if self._resting is not None:
            self._moved.append((self._all() != self._resting).sum())
        self._resting = None

    def _all(self) -> Tensor:
        sample = self._sample
        gradients = [p.grad for p in sample.parameters]
        found = [sample.bits(one) for one in (*sample.weights_and_moments(), gradients)]
        return torch.cat((*found, found[0].new_tensor([self._engine.model.training])))

    def _window_norms(self) -> Tensor:
        """Of the weights [P], then of a window of weights and moments each [up to 3 P].

        In one call, of windows that a cache holds: a look at every step has to be cheap. What
        changes places in a tensor leaves its norm as it is, and that of a window not.
        """
        there = [one for tensors in self._sample.weights_and_moments() for one in tensors]
        places = [0 if tensor is None else tensor.data_ptr() for tensor in there]
        # Cutting tensors takes longer than the look itself, and they stay where they are.
        if places != self._places:
            self._places = places
            self._looked_at = [p.detach() for p in self._sample.parameters] + [
                tensor.view(-1)[window]
                for tensor, window in zip(there, 3 * self._windows, strict=True)
                if tensor is not None
            ]
        return torch.stack(torch._foreach_norm(self._looked_at))


def _window(numel: int, seed: int) -> slice:
    """About half of so many elements, at most `_WINDOW`, at a place that the seed draws."""
    size = min(_WINDOW, max(1, numel // 2))
    begin = random.Random(seed).randint(0, numel - size)  # noqa: S311 - a place, not a secret
    return slice(begin, begin + size)
