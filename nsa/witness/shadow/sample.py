"""What is noted of a model and its optimizer: drawn elements, sums and bits, always in one order.

What a `Sample` notes in a step does not wait for the device. Drawn elements miss a row that none
of them lies in. In sums with random signs each element counts, and they are linear: the sums of a
mean over ranks are the mean of the ranks' sums. One whose elements are independent comes out about
as large as an element.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

from nsa.attention.selection import full_float32
from nsa.step.engine import Engine
from nsa.witness.gradient_probe import pieces

# What the optimizer has to be, beside what the config says: written down again, not read from it.
BETAS, EPS = (0.9, 0.95), 1e-8
# Whole numbers of so many bytes.
_WHOLE = {2: torch.int16, 4: torch.int32, 8: torch.int64}
# Elements that are looked at together: a CPU waits for no host, and its memory grows by the copies.
_TOGETHER = {"cuda": 1 << 24}
# Of these, those that are widened to float64 at a time.
_WIDENED = 1 << 22
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

    gradient: of the sample [N], then its sums [P * SAMPLED].
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


@dataclass(frozen=True, kw_only=True)
class _Alike:
    """Parameters of one shape, looked at together.

    A large GPU waits for a host that looks at one after the other: some hundred parameters took it
    longer than the step itself. places: of each the numbers of the sampled elements [n, K]. rows,
    columns: random signs [n, SAMPLED, R] and [n, SAMPLED, C]; an element's sign in a sum is its
    row's times its column's. A vector has one column.
    """

    numbers: slice
    places: Tensor
    rows: Tensor
    columns: Tensor

    @torch.no_grad()
    def of(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """A tensor for each parameter as one [n, R, C]; 0 where there is none."""
        own = tensors[self.numbers]
        shape = (len(own), self.rows.shape[2], self.columns.shape[2])
        there = next((tensor for tensor in own if tensor is not None), None)
        if there is None:
            return self.rows.new_zeros(()).expand(shape)
        if len(own) == 1:
            return there.reshape(shape)
        all_there = [torch.zeros_like(there) if tensor is None else tensor for tensor in own]
        return torch.stack(all_there).reshape(shape)

    def elements(self, x: Tensor) -> Tensor:
        """The sampled ones of x [n, R, C], as a vector."""
        return x.flatten(1).gather(1, self.places).flatten()

    def sums(self, x: Tensor) -> Tensor:
        """Sums of x [n, R, C] in float32 [n, SAMPLED]."""
        with full_float32():
            return (self.rows @ x * self.columns).sum(2) / math.sqrt(x[0].numel())

    def exact(self, x: Tensor) -> Tensor:
        """The same in float64."""
        size = max(1, _WIDENED // x[:, 0].numel())
        total = torch.zeros(self.columns.shape, dtype=torch.float64, device=x.device)
        for signs, part in zip(
            torch.split(self.rows, size, 2), torch.split(x, size, 1), strict=True
        ):
            total.baddbmm_(signs.double(), part.double())
        return (total * self.columns).sum(2) / math.sqrt(x[0].numel())


class Sample:
    """The parameters of an engine's model, those of one shape side by side, and what is noted.

    owner: of each sampled element, the number of its parameter [N]; owners: and of each sum.
    """

    def __init__(self, engine: Engine, seed: int) -> None:
        self._engine = engine
        drawn = _places(engine, seed)
        places = dict(sorted(drawn.items(), key=lambda item: item[0].shape))
        self.parameters = list(places)
        self._groups = list(_groups(places, _signs(drawn, seed)))
        counts = torch.tensor([len(found) for found in places.values()])
        each = torch.arange(len(counts))
        self.owner = torch.repeat_interleave(each, counts)
        self.owners = torch.cat((self.owner, each.repeat_interleave(SAMPLED)))

    def begun(self) -> Begun:
        """A step has its gradient, before it is clipped."""
        grads = [p.grad for p in self.parameters]
        norms = [_norms(x) for _, x in self._each(grads)]
        return Begun(
            state=self.state(),
            gradient=self.gradient(grads),
            norm=vector_norm(torch.cat(norms)),
            scale=float(self._engine.scaler.get_scale()),
            has_gradient=[g is not None for g in grads],
        )

    def seen(self, begun: Begun, norm: Tensor) -> Seen:
        """Its update is over; `norm`: as the trainer tells it."""
        sums, sizes = [], []
        weights, first, second = self.weights_and_moments()
        counts = at_least_one(self._counts().to(self._engine.device))
        for group in self._groups:
            way = way_of(group.of(first), group.of(second), counts[group.numbers])
            sums.append(group.exact(way))
            sizes.append(torch.stack([whole_rms(way), whole_rms(group.of(weights))], 1))
        return Seen(
            begun=begun,
            state=self.state(),
            way=torch.cat(sums),
            sizes=torch.cat(sizes),
            norm=norm.detach().clone(),
        )

    def state(self) -> State:
        """Weights and moments as they are now."""
        values, found, sums = [], [], []
        for kind, tensors in enumerate(self.weights_and_moments()):
            for group, x in self._each(tensors):
                values.append(group.elements(x))
                found.append(bits(x))
                sums += [] if kind else [group.exact(x)]
        return State(
            values=torch.cat(values).view(3, -1),
            bits=torch.cat(found).view(3, -1),
            counts=self._counts(),
            sums=torch.cat(sums),
        )

    def gradient(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """The sampled elements of a tensor for each parameter, and its sums."""
        elements, sums = [], []
        for group, x in self._each(tensors):
            elements.append(group.elements(x))
            sums.append(group.sums(x).flatten())
        return torch.cat(elements + sums)

    def elements(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """The sampled elements of a tensor for each parameter; 0 where there is none."""
        return torch.cat([group.elements(x) for group, x in self._each(tensors)])

    def bits(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Of a tensor for each parameter [P]."""
        return torch.cat([bits(x) for _, x in self._each(tensors)])

    def weights_and_moments(self) -> Iterator[Sequence[Tensor | None]]:
        """The weights, then each kind of moment, which there are none of before an update."""
        entries = self._entries()
        yield [p.detach() for p in self.parameters]
        yield from ([e.get(name) for e in entries] for name in ("exp_avg", "exp_avg_sq"))

    def _each(self, tensors: Sequence[Tensor | None]) -> Iterator[tuple[_Alike, Tensor]]:
        """One group after the other, which is all that is held at a time."""
        return ((group, group.of(tensors)) for group in self._groups)

    def _counts(self) -> Tensor:
        """The updates that each parameter had [P]."""
        entries = self._entries()
        # The fused kernel counts on the device, the others on the host.
        none = torch.zeros((), device=next((e["step"].device for e in entries if e), None))
        return torch.stack([e["step"] if e else none for e in entries])

    def _entries(self) -> list[dict[str, Tensor]]:
        """What the optimizer keeps of each parameter; nothing before its first update."""
        return [self._engine.optimizer.state.get(p, {}) for p in self.parameters]


def _places(engine: Engine, seed: int) -> dict[nn.Parameter, Tensor]:
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
    return {p: torch.cat(places).to(engine.device) for p, places in found.items()}


def _signs(
    parameters: Iterable[nn.Parameter], seed: int
) -> dict[nn.Parameter, tuple[Tensor, Tensor]]:
    """Of each parameter those of its rows and columns, whichever others it is looked at with."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(size: int, like: Tensor) -> Tensor:
        signs = torch.randint(2, (SAMPLED, size), generator=generator) * 2 - 1
        return signs.to(device=like.device, dtype=like.dtype)

    return {p: (drawn(len(p), p), drawn(p[0].numel(), p)) for p in parameters}


def _groups(
    places: Mapping[nn.Parameter, Tensor], signs: Mapping[nn.Parameter, tuple[Tensor, Tensor]]
) -> Iterator[_Alike]:
    """Neighbors of one shape, of so many elements at most."""
    begin = 0
    for _, alike in groupby(places, key=lambda p: (p.shape, len(places[p]))):
        of_one_shape = list(alike)
        first = of_one_shape[0]
        most = max(1, _TOGETHER.get(first.device.type, 1) // first.numel())
        for start in range(0, len(of_one_shape), most):
            own = of_one_shape[start : start + most]
            rows, columns = zip(*(signs[p] for p in own), strict=True)
            yield _Alike(
                numbers=slice(begin, begin + len(own)),
                places=torch.stack([places[p] for p in own]),
                rows=torch.stack(rows),
                columns=torch.stack(columns),
            )
            begin += len(own)


def bits(x: Tensor) -> Tensor:
    """A whole number [n] of all bits of each x [n, R, C]: of sums of rows and of columns.

    Exact: another bit in one element gives another number, and so do two that change places. Each
    sum counts times its place, modulo 2^64.
    """
    whole = x.view(_WHOLE[x.element_size()])
    total = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    for dim, factor in ((2, 1), (1, 1_000_003)):
        sums = whole.sum(dim, dtype=torch.int64)
        place = torch.arange(1, sums.shape[1] + 1, device=x.device)
        total = total + factor * (sums * place).sum(1)
    return total


def way_of(first: Tensor, second: Tensor, counts: Tensor) -> Tensor:
    """What the moments [n, R, C] make of parameters, but for the rate; 0 without moments.

    counts: the updates of each [n], one at least.
    """
    left = (1 - BETAS[1] ** counts).sqrt()[:, None, None].to(second.dtype)
    return first / second.sqrt().div_(left).add_(EPS)


def whole_rms(x: Tensor) -> Tensor:
    """Root mean square [n] of all elements of each x [n, R, C], in float64."""
    return _norms(x) / math.sqrt(x[0].numel())


def _norms(x: Tensor) -> Tensor:
    norms: Tensor = vector_norm(x, dim=(1, 2), dtype=torch.float64)
    return norms


def at_least_one(count: Tensor) -> Tensor:
    """So many updates in float64; a parameter that had none does not move, whatever is divided."""
    return count.to(torch.float64).clamp_min(1)
