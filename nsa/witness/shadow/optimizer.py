"""A second optimizer beside the real one: AdamW's equation in float64.

At a few pairs of steps that the run's token draws, a sample of every piece of the parameters is
noted: gradient as reduced and before it is clipped, weight and both moments before and after the
update. From the gradient, the config and its learning-rate schedule follows what the update had to
give. Sums of all elements hold those that no sample meets. In some of these steps loss and
gradient are computed a second time (`recompute`). Nothing waits for the device before the run has
ended.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nsa.contract.digests import recomputed_steps, watched_steps
from nsa.data.source import Batch
from nsa.step.engine import Engine
from nsa.witness.accounts import or_null, pieces, plain_floats
from nsa.witness.shadow.adamw import Sums, bits, moved, updated, way_of, whole_rms
from nsa.witness.shadow.recompute import Bias, Recomputed, gap, recompute, step_off

# torch takes a norm that it clips for so much larger.
_CLIP_EPS = 1e-6
# Of each piece so many elements, at places that the run's token draws.
_SAMPLED = 16
_ROUNDOFF = 2.0**-24
# Elements of a tensor that are looked at in every step.
_WINDOW = 1 << 16


@dataclass(frozen=True, kw_only=True)
class _State:
    """Weight and moments [3, N] of the sample, and the updates that each parameter had [P].

    bits: of all weights and moments [3, P]. sums: of all its weights [P, _SAMPLED], in float64.
    """

    values: Tensor
    bits: Tensor
    counts: Tensor
    sums: Tensor


@dataclass(frozen=True, kw_only=True)
class _Begun:
    """What was noted before clipping, still on the device. `scale`: the loss was scaled by it.

    gradient: of the sample [N], then its `Sums` [P * _SAMPLED].
    """

    state: _State
    gradient: Tensor
    norm: Tensor
    scale: float
    has_gradient: list[bool]


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """A step whose update is over. `norm`: as the trainer tells it."""

    begun: _Begun
    state: _State
    norm: Tensor
    # What the moments make of all weights, but for the rate: its sums [P, _SAMPLED], and the root
    # mean squares of it and of the weights [P, 2].
    way: Tensor
    sizes: Tensor


class Shadow:
    """Watches the optimizer in the drawn steps of a launch that goes from `first` to `last`."""

    def __init__(self, engine: Engine, *, token: str, first: int, last: int) -> None:
        self._engine = engine
        self._watched = frozenset(watched_steps(token, first, last))
        profiled = engine.plan.flags.profile_steps > 0
        self.recomputed = frozenset(recomputed_steps(token, first, last, profiled=profiled))
        self._again: dict[int, Recomputed] = {}
        # By the step: how far the pass is from the equations, as `step_off` says.
        self._off: dict[int, dict[str, float]] = {}
        self._seed = _seed(token)
        self._parameters, self._places = _places(engine, self._seed)
        self._owner = torch.repeat_interleave(
            torch.arange(len(self._places)), torch.tensor([len(p) for p in self._places])
        )
        self._windows = [_window(p.numel(), self._seed + n) for n, p in enumerate(self._parameters)]
        self._places_of: list[int] = []
        self._looked_at: list[Tensor] = []
        self._sums = Sums(self._parameters, count=_SAMPLED, seed=self._seed)
        self._summed = torch.arange(len(self._places)).repeat_interleave(_SAMPLED)
        # Matrices decay, nothing else does.
        decay = engine.plan.config.train.weight_decay
        self._decay = torch.tensor(
            [decay * (p.dim() >= 2) for p in self._parameters], dtype=torch.float64
        )
        self._begun: dict[int, _Begun] = {}
        self._seen: dict[int, _Seen] = {}
        self._moved: list[Tensor] = []
        self._left: list[Tensor] = []
        self._rate = 0.0
        # As the last update before an evaluation left them, or the checkpoint that is gone on from.
        self._updated = self._bits(self._parameters)
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
        self._rested()
        self._resting = self._at_rest()
        yield
        self._rested()
        self._resting = self._at_rest()

    def _rested(self) -> None:
        """Look whether all is as it was left, if it had to rest until now."""
        if self._resting is not None:
            self._moved.append((self._at_rest() != self._resting).sum())
        self._resting = None

    def _at_rest(self) -> Tensor:
        gradients = self._bits([p.grad for p in self._parameters])
        mode = gradients.new_tensor([self._engine.model.training])
        return torch.cat((self._all_bits().flatten(), gradients, mode))

    def evaluating(self) -> None:
        """A held-out batch is in the model, which has to hold what the last update left."""
        now = self._bits(self._parameters)
        self._moved.append((now != self._updated).sum())

    def recompute(self, step: int, batches: Sequence[Batch], *, from_host: int = 0) -> None:
        """What the step that is about to begin has to make of these micro-batches. A collective.

        from_host: so many passes the modules will run themselves, whatever is recorded or compiled.
        """
        self._again[step] = recompute(
            self._engine,
            batches,
            self._parameters,
            sample=self._gradient,
            seed=self._seed + step,
            from_host=from_host,
            together=_SAMPLED if step == min(self.recomputed) else None,
        )
        # The proof held the first batch.
        if step > min(self.recomputed):
            seed, begins = self._seed + step + self._engine.ranks.rank, step - 1
            # Of trained weights values have no bound in half types.
            values = self._engine.plan.config.runtime.precision == "fp32"
            slope = values and (begins not in self.recomputed or begins == min(self.recomputed))
            self._off[step] = step_off(self._engine, batches[0], seed, values=values, slope=slope)

    def watch(self, step: int) -> None:
        """A step begins. Right before its update look at what that begins with, and note the
        gradient before it is clipped, if the step is a drawn one.

        Then no gradient may be there yet: the step's own would be added to it.
        """
        self._rested()
        watched = step in self._watched
        if watched:
            self._left.append((self._sample([p.grad for p in self._parameters]) != 0).sum())

        def before_clipping() -> None:
            self._look()
            if watched:
                self._note(step)

        self._engine.before_clipping = before_clipping

    def _look(self) -> None:
        """Are weights and moments as the last update left them, right before the next one?"""
        if self._norms is not None:
            norms = self._own_norms()
            # What has lost its moments, or got some, has others.
            same = norms.shape == self._norms.shape
            self._changed = self._changed + ((norms != self._norms).sum() if same else 1)
            self._norms = None

    def updated(self, step: int, norm: Tensor) -> None:
        """The step's update is over; `norm`: of its gradients, as the trainer tells it."""
        every = self._engine.plan.config.train.eval_every
        if every and step % every == 0:
            self._updated = self._bits(self._parameters)
        self._norms = self._own_norms()
        # Numbers of the host: those of every step.
        rates = tuple(float(group["lr"]) for group in self._engine.optimizer.param_groups)
        due = self._engine.rate(step)
        self._rate = _worst([self._rate, *(abs(own - due) / (due or 1.0) for own in rates)])
        begun = self._begun.pop(step, None)
        if begun is None:
            return
        way, sizes = self._way()
        self._seen[step] = _Seen(
            begun=begun,
            state=self._state(),
            way=way,
            sizes=sizes,
            norm=norm.detach().clone(),
        )

    def report(self) -> dict[str, Any]:
        """The steps watched, and the largest gap of each kind. Synchronizes.

        `weight`, `first_moment`, `second_moment`: from AdamW's equation, in roundoffs of float32;
        `norm` and `rate`: from the true norm and, of all steps, from the schedule, as shares;
        `jumps`: weights and moments of parameters that were not before a step what they were after
        the one before, that changed where all has to rest, or that an evaluation had otherwise than
        the last update left them, and counts that did not go up by one; `left`: elements that had a
        gradient before the step's first backward pass.
        """
        worst = dict.fromkeys(("weight", "first_moment", "second_moment", "norm"), 0.0)
        jumps = int(self._changed) + sum(int(moved) for moved in self._moved)
        for step, seen in self._seen.items():
            gaps, wrong_counts = self._gaps(step, seen)
            # A NaN stays the worst.
            worst = {n: g if not g <= worst[n] else worst[n] for n, g in gaps.items()}
            jumps += wrong_counts
            earlier = self._seen.get(step - 1)
            if earlier is not None:
                jumps += int((earlier.state.bits != seen.begun.state.bits).sum())
        left = sum(int(found) for found in self._left)
        told = plain_floats({**worst, "rate": self._rate})
        return {"steps": list(self._seen), **told, "jumps": jumps, "left": left}

    def parted(self) -> str:
        """Which parameters differ between the ranks, and since when, in words. A collective.

        Later on all of them do: each follows from the others.
        """
        ranks = self._engine.ranks
        named = {id(parameter): name for name, parameter in self._engine.model.named_parameters()}
        owners = torch.cat((self._owner, self._summed)).to(self._engine.device)
        one_each = torch.arange(len(self._parameters), device=self._engine.device)
        for step, seen in sorted(self._seen.items()):
            for what, own, of in (
                ("gradient", seen.begun.gradient, owners),
                ("weights", seen.state.bits[0], one_each),
            ):
                off = (own != ranks.tensor_of_rank0(own)).double()
                found = ranks.sum(
                    torch.zeros_like(one_each).double().index_add(0, of, off).tolist()
                )
                apart = [named[id(p)] for p, n in zip(self._parameters, found, strict=True) if n]
                if apart:
                    count = f"{len(apart)} of {len(found)} parameters"
                    return f"seen first in step {step}: the {what} of {count}, first {apart[0]}"
        return "since the last update"

    def report_recomputed(self) -> dict[str, Any]:
        """The steps computed twice, the losses that they had to have, the gradients' largest gap.

        `norms`: of the gradients as they were before clipping; null of one that is not finite.

        `gradient`: of a piece, or of a parameter's sums, in root mean squares, as a share of what
        the ranks' gradients are.
        seams, layers, logits, slopes: as `OracleCheck.step_errors` says, by step, and not of the
        first; in half types seams alone.
        `ranks`: how far this rank is from all ranks' mean in the same micro-batch. `bias`: what the
        gradients' errors are on average, as `Bias` tells it. `gates`: of each
        step and layer what `branch_use` says; null on other ranks than 0, which writes gates.csv.
        Synchronizes.
        """
        gaps, apart, bias = [0.0], [0.0], Bias()
        ended = [step for step in self._again if step in self._seen]
        for step in ended:
            again, begun = self._again[step], self._seen[step].begun
            asked = torch.tensor(again.asked)[torch.cat((self._owner, self._summed))]
            rescaled = begun.gradient.double() * (again.scale / begun.scale)
            reduced = rescaled * asked.to(rescaled.device)
            # A step that the scaler leaves out has no gradient to hold.
            if self._moves(begun):
                gaps.append(gap(again, reduced, _SAMPLED))
                # Of elements alone: sums are not rounded.
                bias = bias.with_step(again, reduced[: len(self._owner)])
                apart += [] if again.apart is None else [float(again.apart)]
        losses = [float(self._again[step].loss) for step in ended]
        told = plain_floats({"gradient": _worst(gaps), "ranks": _worst(apart)})
        told["bias"] = plain_floats(bias.report())
        gates = [self._again[step].gates.tolist() for step in ended]
        norms = [self._norm(self._seen[step].begun) for step in ended]
        first = self._engine.ranks.rank == 0
        return {
            "steps": ended,
            "losses": losses,
            "norms": [or_null(norm) for norm in norms],
            **told,
            "gates": gates if first else None,
            **{
                name: {
                    step: or_null(off[name])
                    for step, off in self._off.items()
                    if step in ended and name in off
                }
                for name in ("seams", "layers", "logits", "slopes")
            },
        }

    @staticmethod
    def _norm(begun: _Begun) -> float:
        """Of the gradient of a loss that was not scaled."""
        return float(begun.norm) / begun.scale

    def _moves(self, begun: _Begun) -> bool:
        """Under a scaler, a step whose gradients are not finite is left out."""
        return not self._engine.scaler.is_enabled() or float(begun.norm) < float("inf")

    def _note(self, step: int) -> None:
        grads = [p.grad for p in self._parameters]
        norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in grads if g is not None]
        scaler = self._engine.scaler
        norms = norms or [torch.zeros((), dtype=torch.float64)]
        self._begun[step] = _Begun(
            state=self._state(),
            gradient=self._gradient(grads),
            norm=torch.linalg.vector_norm(torch.stack(norms)),
            scale=float(scaler.get_scale()) if scaler.is_enabled() else 1.0,
            has_gradient=[g is not None for g in grads],
        )

    def _own_norms(self) -> Tensor:
        """Of the weights [P], then of a window of weights and moments each [up to 3 P].

        In one call, of windows that a cache holds: a look at every step has to be cheap. What
        changes places in a tensor leaves its norm as it is, and that of a window not.
        """
        there = [one for tensors in self._weights_and_moments() for one in tensors]
        places = [0 if tensor is None else tensor.data_ptr() for tensor in there]
        # Cutting tensors takes longer than the look itself, and they stay where they are.
        if places != self._places_of:
            self._places_of = places
            self._looked_at = [p.detach() for p in self._parameters] + [
                tensor.view(-1)[window]
                for tensor, window in zip(there, 3 * self._windows, strict=True)
                if tensor is not None
            ]
        return torch.stack(torch._foreach_norm(self._looked_at))

    def _entries(self) -> list[dict[str, Tensor]]:
        """What the optimizer keeps of each parameter; nothing before its first update."""
        return [self._engine.optimizer.state.get(p, {}) for p in self._parameters]

    def _values(self) -> Tensor:
        """Weight and moments [3, N] of the sample."""
        return torch.stack([self._sample(tensors) for tensors in self._weights_and_moments()])

    def _all_bits(self) -> Tensor:
        """Of weights and moments [3, P]."""
        return torch.stack([self._bits(tensors) for tensors in self._weights_and_moments()])

    def _bits(self, tensors: Sequence[Tensor | None]) -> Tensor:
        return bits(tensors, self._engine.device)

    def _weights_and_moments(self) -> Iterator[Sequence[Tensor | None]]:
        entries = self._entries()
        yield [p.detach() for p in self._parameters]
        yield from ([e.get(name) for e in entries] for name in ("exp_avg", "exp_avg_sq"))

    def _state(self) -> _State:
        entries = self._entries()
        # The fused kernel counts on the device, the others on the host.
        none = torch.zeros((), device=next((e["step"].device for e in entries if e), None))
        counts = [e["step"] if e else none for e in entries]
        sums = [self._sums.exact(n, p.detach()) for n, p in enumerate(self._parameters)]
        return _State(
            values=self._values(),
            bits=self._all_bits(),
            counts=torch.stack(counts),
            sums=torch.stack(sums),
        )

    def _way(self) -> tuple[Tensor, Tensor]:
        """What `_Seen` calls `way` and `sizes`, one parameter after the other."""
        sums, sizes = [], []
        for number, (parameter, entry) in enumerate(
            zip(self._parameters, self._entries(), strict=True)
        ):
            way = way_of(parameter, entry)
            sums.append(self._sums.exact(number, way))
            sizes.append(torch.stack([whole_rms(way), whole_rms(parameter.detach())]))
        return torch.stack(sums), torch.stack(sizes)

    def _gradient(self, tensors: Sequence[Tensor | None]) -> Tensor:
        return torch.cat((self._sample(tensors), self._sums.of(tensors)))

    def _sample(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """The sampled elements of a tensor for each parameter; 0 where there is none."""
        taken = [
            torch.zeros(len(places), device=places.device)
            if tensor is None
            else tensor.reshape(-1).index_select(0, places)
            for tensor, places in zip(tensors, self._places, strict=True)
        ]
        return torch.cat(taken)

    def _gaps(self, step: int, seen: _Seen) -> tuple[dict[str, float], int]:
        """The gaps of one step by name, and how many parameters count it otherwise than once."""
        begun = seen.begun
        norm, told = self._norm(begun), float(seen.norm)
        rate = self._engine.rate(step)
        left_out = not self._moves(begun)
        moves = torch.tensor(begun.has_gradient) & (not left_out)
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
        idle = ~moves[self._owner]
        wanted[:, idle] = before[:, idle]
        off = (after - wanted).abs() / (_ROUNDOFF * explained)
        off[:, idle] = (after != before)[:, idle].double() / _ROUNDOFF
        gaps = dict(
            zip(("weight", "first_moment", "second_moment"), off.amax(1).tolist(), strict=True)
        )
        gaps["weight"] = _worst([gaps["weight"], self._off_as_a_whole(seen, rate, moves)])
        gaps |= {"norm": 0.0 if left_out else abs(told / norm - 1) if norm else told}
        return gaps, int((now != was + moves).sum())

    def _off_as_a_whole(self, seen: _Seen, rate: float, moves: Tensor) -> float:
        """How far the sums of all weights are from AdamW's with these moments, in roundoffs."""
        before, after, way, sizes = (
            x.cpu() for x in (seen.begun.state.sums, seen.state.sums, seen.way, seen.sizes)
        )
        wanted, explained = moved(
            before,
            way,
            sizes,
            rate=rate * moves,
            decay=self._decay,
            count=seen.state.counts.cpu(),
        )
        return float(((after - wanted).abs() / (_ROUNDOFF * explained)).max())


def _worst(gaps: list[float]) -> float:
    """The largest; a NaN stays the worst."""
    return next((one for one in gaps if one != one), max(gaps))


def _seed(token: str) -> int:
    return int.from_bytes(hashlib.blake2b(token.encode(), digest_size=7).digest(), "little")


def _window(numel: int, seed: int) -> slice:
    """About half of so many elements, at most `_WINDOW`, at a place that the seed draws."""
    size = min(_WINDOW, max(1, numel // 2))
    begin = random.Random(seed).randint(0, numel - size)  # noqa: S311 - a place, not a secret
    return slice(begin, begin + size)


def _places(engine: Engine, seed: int) -> tuple[list[nn.Parameter], list[Tensor]]:
    """The parameters, and of each the numbers of the sampled elements, on the device."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[nn.Parameter, list[Tensor]] = {}
    for piece in pieces(engine.model):
        if not piece.parameter.requires_grad:
            continue
        width = piece.parameter[0].numel()
        numel = piece.of(piece.parameter).numel()
        drawn = torch.randint(0, numel, (_SAMPLED,), generator=generator)
        found.setdefault(piece.parameter, []).append(drawn + (piece.rows.start or 0) * width)
    return list(found), [torch.cat(places).to(engine.device) for places in found.values()]
