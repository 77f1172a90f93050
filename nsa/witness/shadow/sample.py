"""What is noted of a model and its optimizer: drawn elements, sums and bits, always in one order.

What a `Sample` notes in a step does not wait for the device. Drawn elements miss a row that none
of them lies in. In sums with random signs each element counts, and they are linear: the sums of a
mean over ranks are the mean of the ranks' sums. One whose elements are independent comes out about
as large as an element.

Of the whole launch: how its weights began, how far each group of them moved, and the updates.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nsa.attention.selection import full_float32
from nsa.contract import WEIGHT_CUTS, WEIGHT_SIGNS
from nsa.layer import Columns, NSAAttention
from nsa.model import NSALanguageModel
from nsa.step.engine import Engine

# What the optimizer has to be, beside what the config says: written down again, not read from it.
BETAS, EPS = (0.9, 0.95), 1e-8
# Whole numbers of so many bytes.
_WHOLE = {2: torch.int16, 4: torch.int32, 8: torch.int64}
# Elements that are widened to float64 at a time.
_AT_ONCE = 1 << 20
# Of each piece so many elements, at places that the run's token draws; so many sums of each
# parameter, too.
SAMPLED = 16
# Evenly spaced ones, to tell how far it moved in the whole launch.
_SPACED = 2048
_LAYER_NUMBER = re.compile(r"^layers\.\d+\.")


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


class Sums:
    """`count` sums of each parameter's gradient; an element's sign is its row's times its column's.

    The signs are drawn by `seed`. A vector has one column.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], *, count: int, seed: int) -> None:
        self._count = count
        generator = torch.Generator().manual_seed(seed)

        def drawn(size: int, like: Tensor) -> Tensor:
            signs = torch.randint(2, (count, size), generator=generator) * 2 - 1
            return signs.to(device=like.device, dtype=like.dtype)

        self._signs = [(drawn(len(p), p), drawn(p[0].numel(), p)) for p in parameters]

    def of(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """The sums [P * count] of a gradient for each parameter; 0 where there is none."""
        with full_float32():
            return torch.cat(
                [
                    rows.new_zeros(self._count)
                    if gradient is None
                    else (rows @ gradient.reshape(rows.shape[1], -1) * columns).sum(1)
                    / math.sqrt(gradient.numel())
                    for gradient, (rows, columns) in zip(gradients, self._signs, strict=True)
                ]
            )

    def exact(self, number: int, tensor: Tensor) -> Tensor:
        """The same of a tensor for the parameter of this number, in float64 [count]."""
        rows, columns = self._signs[number]
        matrix = tensor.reshape(rows.shape[1], -1)
        size = max(1, _AT_ONCE // matrix.shape[1])
        total = torch.zeros(columns.shape, dtype=torch.float64, device=tensor.device)
        for signs, part in zip(torch.split(rows, size, 1), torch.split(matrix, size), strict=True):
            total += signs.double() @ part.double()
        return (total * columns).sum(1) / math.sqrt(tensor.numel())


def bits(tensors: Iterable[Tensor | None], device: torch.device) -> Tensor:
    """A whole number [n] of all bits of each tensor; 0 where there is none. All are on `device`.

    Exact: another bit in one element gives another number, and so do two that change places.
    """
    none = torch.zeros((), dtype=torch.int64, device=device)
    return torch.stack([none if tensor is None else _bits(tensor) for tensor in tensors])


def _bits(tensor: Tensor) -> Tensor:
    """Sums of rows and of columns as whole numbers, each times its place, modulo 2^64."""
    whole = tensor.detach().view(_WHOLE[tensor.element_size()])
    grid = whole.reshape(-1, whole.shape[-1] if whole.dim() else 1)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for dim, factor in ((1, 1), (0, 1_000_003)):
        sums = grid.sum(dim, dtype=torch.int64)
        total = total + factor * (sums * torch.arange(1, len(sums) + 1, device=sums.device)).sum()
    return total


def way_of(parameter: Tensor, entry: Mapping[str, Tensor]) -> Tensor:
    """What the optimizer's moments make of a parameter, but for the rate; 0 without moments."""
    if not entry:
        return torch.zeros_like(parameter)
    left = 1 - BETAS[1] ** at_least_one(entry["step"].to(parameter.device))
    root = entry["exp_avg_sq"].sqrt().div_(left.sqrt()).add_(EPS)
    way: Tensor = entry["exp_avg"] / root
    return way


def whole_rms(x: Tensor) -> Tensor:
    """Root mean square of all elements, in float64."""
    norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.float64)
    return norm / math.sqrt(x.numel())


def at_least_one(count: Tensor) -> Tensor:
    """So many updates in float64; a parameter that had none does not move, whatever is divided."""
    return count.to(torch.float64).clamp_min(1)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Rows of a parameter with one job. `group`: that job, the same in every layer."""

    group: str
    name: str
    parameter: nn.Parameter
    rows: slice

    def of(self, tensor: Tensor) -> Tensor:
        """These rows of a tensor shaped like the parameter."""
        return tensor[self.rows]


def pieces(model: NSALanguageModel) -> Iterator[Piece]:
    """Every parameter once, the attention's one projection cut into what it makes."""
    cuts: dict[int, dict[str, slice]] = {}
    for module in model.modules():
        if isinstance(module, NSAAttention):
            cuts[id(module.in_proj.weight)] = Columns(cfg=module.cfg).slices
    for name, parameter in model.named_parameters():
        group = _LAYER_NUMBER.sub("", name).removesuffix(".weight")
        whole = {"": slice(None)}
        for part, rows in cuts.get(id(parameter), whole).items():
            yield Piece(
                group=f"attention.{part}" if part else group,
                name=f"{name}[{part}]" if part else name,
                parameter=parameter,
                rows=rows,
            )


def least_by_group(values: Sequence[tuple[Piece, float]]) -> dict[str, float]:
    """The smallest value among the pieces of each group: the layer that is worst off."""
    least: dict[str, float] = {}
    for piece, value in values:
        least[piece.group] = min(value, least.get(piece.group, value))
    return least


class Movement:
    """How far the parameters moved since this was made, from a sample of every piece."""

    def __init__(self, model: NSALanguageModel) -> None:
        self._start = [(piece, _sample(piece)) for piece in pieces(model)]

    def by_group(self) -> dict[str, float]:
        """Root mean square of the change, of the piece that moved least in each group."""
        changes = [(p, (_sample(p) - before).square().mean().sqrt()) for p, before in self._start]
        return least_by_group([(piece, float(change)) for piece, change in changes])


def _sample(piece: Piece) -> Tensor:
    flat = piece.of(piece.parameter.detach()).flatten()
    stride = max(1, flat.numel() // _SPACED)
    return flat[::stride].double().clone()


def or_null(number: float, digits: int = 17) -> float | None:
    """The number to so many digits, for a line that has no NaN: None where it is not finite."""
    return float(f"{number:.{digits}g}") if math.isfinite(number) else None


def plain_floats(values: dict[str, float]) -> dict[str, Any]:
    """Rounded to six digits, for a line that people may read."""
    return {name: float(f"{value:.6g}") for name, value in values.items()}


@torch.no_grad()
def first_weights(model: NSALanguageModel) -> dict[str, dict[str, Any]]:
    """Of each group of the parameters, one number for each layer: the `weights` of the proof.

    n: elements of a piece; mean, rms, least, most; below: how many are at most `WEIGHT_CUTS` times
    the rms; signs: those of the first `WEIGHT_SIGNS` elements as bits, in hexadecimal. Five passes
    over the parameters' memory or so, and no copy of them.
    """
    groups: dict[str, dict[str, Any]] = {}
    for piece in pieces(model):
        told = _numbers(piece.of(piece.parameter.detach()).flatten())
        group = groups.setdefault(piece.group, {name: [] for name in told})
        for name, value in told.items():
            group[name].append(value)
    return groups


def _numbers(flat: Tensor) -> dict[str, Any]:
    # Sums in float64, but no float64 copy: an embedding's would be the most that a step holds.
    norm = torch.linalg.vector_norm(flat, dtype=torch.float64)
    rms = norm / flat.numel() ** 0.5
    mean = flat.sum(dtype=torch.float64) / flat.numel()
    below = torch.stack([(flat <= cut * rms).sum() for cut in WEIGHT_CUTS])
    told = torch.stack([mean, rms, flat.min(), flat.max()]).tolist()
    bits = "".join("1" if up else "0" for up in (flat[:WEIGHT_SIGNS] > 0).tolist())
    return {
        "n": flat.numel(),
        **{
            name: float(f"{value:.9g}")
            for name, value in zip(("mean", "rms", "least", "most"), told, strict=True)
        },
        "below": below.tolist(),
        "signs": f"{int(bits, 2):x}",
    }


def updates(optimizer: Optimizer) -> list[int]:
    """Fewest and most updates of a parameter, as the optimizer itself counts them."""
    counts = [int(entry["step"]) for entry in optimizer.state.values()]
    return [min(counts), max(counts)] if counts else [0, 0]
