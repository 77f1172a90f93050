"""What is noted of a model and its optimizer: drawn elements, sums and bits, always in one order.

Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nsa.step.engine import Engine
from nsa.witness.accounts import pieces
from nsa.witness.shadow.adamw import Sums, bits, way_of, whole_rms

# Of each piece so many elements, at places that the run's token draws; so many sums of each
# parameter, too.
SAMPLED = 16


@dataclass(frozen=True, kw_only=True)
class State:
    """Weight and moments [3, N] of the sample, and the updates that each parameter had [P].

    bits: of all weights and moments [3, P]. sums: of all its weights [P, SAMPLED], in float64.
    """

    values: Tensor
    bits: Tensor
    counts: Tensor
    sums: Tensor


@dataclass(frozen=True, kw_only=True)
class Begun:
    """What was noted before clipping, still on the device. `scale`: the loss was scaled by it.

    gradient: of the sample [N], then its `Sums` [P * SAMPLED].
    """

    state: State
    gradient: Tensor
    norm: Tensor
    scale: float
    has_gradient: list[bool]

    def true_norm(self) -> float:
        """Of the gradient of a loss that was not scaled. Waits for the device."""
        return float(self.norm) / self.scale


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A step whose update is over. `norm`: as the trainer tells it."""

    begun: Begun
    state: State
    norm: Tensor
    # What the moments make of all weights, but for the rate: its sums [P, SAMPLED], and the root
    # mean squares of it and of the weights [P, 2].
    way: Tensor
    sizes: Tensor


class Sample:
    """The parameters of an engine's model, and what is noted of them.

    owner: of each sampled element, the number of its parameter [N]; owners: and of each sum.
    """

    def __init__(self, engine: Engine, seed: int) -> None:
        self._engine = engine
        self.parameters, self._places = _places(engine, seed)
        counts = torch.tensor([len(places) for places in self._places])
        each = torch.arange(len(counts))
        self.owner = torch.repeat_interleave(each, counts)
        self.owners = torch.cat((self.owner, each.repeat_interleave(SAMPLED)))
        self._sums = Sums(self.parameters, count=SAMPLED, seed=seed)

    def begun(self) -> Begun:
        """A step has its gradient, before it is clipped."""
        grads = [p.grad for p in self.parameters]
        norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in grads if g is not None]
        scaler = self._engine.scaler
        norms = norms or [torch.zeros((), dtype=torch.float64)]
        return Begun(
            state=self.state(),
            gradient=self.gradient(grads),
            norm=torch.linalg.vector_norm(torch.stack(norms)),
            scale=float(scaler.get_scale()) if scaler.is_enabled() else 1.0,
            has_gradient=[g is not None for g in grads],
        )

    def seen(self, begun: Begun, norm: Tensor) -> Seen:
        """Its update is over; `norm`: as the trainer tells it."""
        sums, sizes = [], []
        for number, (parameter, entry) in enumerate(
            zip(self.parameters, self._entries(), strict=True)
        ):
            way = way_of(parameter, entry)
            sums.append(self._sums.exact(number, way))
            sizes.append(torch.stack([whole_rms(way), whole_rms(parameter.detach())]))
        return Seen(
            begun=begun,
            state=self.state(),
            way=torch.stack(sums),
            sizes=torch.stack(sizes),
            norm=norm.detach().clone(),
        )

    def state(self) -> State:
        """Weights and moments as they are now."""
        entries = self._entries()
        # The fused kernel counts on the device, the others on the host.
        none = torch.zeros((), device=next((e["step"].device for e in entries if e), None))
        counts = [e["step"] if e else none for e in entries]
        sums = [self._sums.exact(n, p.detach()) for n, p in enumerate(self.parameters)]
        return State(
            values=torch.stack([self.elements(tensors) for tensors in self.weights_and_moments()]),
            bits=self.all_bits(),
            counts=torch.stack(counts),
            sums=torch.stack(sums),
        )

    def gradient(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """The sampled elements of a tensor for each parameter, and its sums."""
        return torch.cat((self.elements(tensors), self._sums.of(tensors)))

    def elements(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """The sampled elements of a tensor for each parameter; 0 where there is none."""
        taken = [
            torch.zeros(len(places), device=places.device)
            if tensor is None
            else tensor.reshape(-1).index_select(0, places)
            for tensor, places in zip(tensors, self._places, strict=True)
        ]
        return torch.cat(taken)

    def all_bits(self) -> Tensor:
        """Of weights and moments [3, P]."""
        return torch.stack([self.bits(tensors) for tensors in self.weights_and_moments()])

    def bits(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Of a tensor for each parameter [P]."""
        return bits(tensors, self._engine.device)

    def weights_and_moments(self) -> Iterator[Sequence[Tensor | None]]:
        """The weights, then each kind of moment, which there are none of before an update."""
        entries = self._entries()
        yield [p.detach() for p in self.parameters]
        yield from ([e.get(name) for e in entries] for name in ("exp_avg", "exp_avg_sq"))

    def _entries(self) -> list[dict[str, Tensor]]:
        """What the optimizer keeps of each parameter; nothing before its first update."""
        return [self._engine.optimizer.state.get(p, {}) for p in self.parameters]


def _places(engine: Engine, seed: int) -> tuple[list[nn.Parameter], list[Tensor]]:
    """The parameters, and of each the numbers of the sampled elements, on the device."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[nn.Parameter, list[Tensor]] = {}
    for piece in pieces(engine.model):
        if not piece.parameter.requires_grad:
            continue
        width = piece.parameter[0].numel()
        numel = piece.of(piece.parameter).numel()
        drawn = torch.randint(0, numel, (SAMPLED,), generator=generator)
        found.setdefault(piece.parameter, []).append(drawn + (piece.rows.start or 0) * width)
    return list(found), [torch.cat(places).to(engine.device) for places in found.values()]
