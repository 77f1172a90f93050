"""Gradients of one layer, as autograd has them, against slopes of the equations.

A step's own gradient is computed twice, but by the same layers: a backward pass that goes wrong
agrees with itself. Here the layer runs once more on what it had for input, and the gradient of a
weighted sum of its output at a few positions is held against central differences of the same sum
in NumPy: each piece (the input, every parameter, each part of the projection) goes a little along
a random direction.

With u a direction of independent normal numbers, <gradient, u> is normal, as wide as the gradient
is long. Directions are divided by that length, so that pieces count alike: what is off by a
share of one piece's gradient is off by that share, times a normal number, over the root of the
number of pieces.

Trained weights may make a layer so steep that roundings of the type alone move its gradient by more
than any bound says. So it is computed a few times more, of numbers that differ by one roundoff
each, and what is off is counted beyond a multiple of what that changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import functional_call

from nsa.config import ModelConfig, NSAConfig
from nsa.model import Layer
from nsa.witness import oracle

Array = NDArray[np.float64]
Within = Callable[[], AbstractContextManager[object]]
# Directions, of which one may by chance be blind.
_DIRECTIONS = 2
# What moves most moves by this share of itself, or of the smallest size that matters to a layer;
# float64 keeps eight digits of the difference.
_FAR, _SMALL = 1e-4, 0.01
# So many times what one roundoff of everything changes, in so many tries, is rounding; nobody has
# to try where no more than so many roundoffs are off.
_ROUNDINGS, _REPEATS, _USUAL = 32, 3, 64
# Of the longest gradient: what is shorter counts as if it were so long.
_LEAST = 0.01
_INPUT, _PROJECTION = "input", "attention.in_proj.weight"


def slope_error(
    layer: Layer, cfg: ModelConfig, x: Tensor, at: NDArray[np.int64], *, within: Within, seed: int
) -> float:
    """How far the layer's gradients are off, for its input x [1,S,dim] and positions at [P].

    As a share, see above; NaN where a gradient is not finite. within: what the layer runs in.
    Leaves no gradient, and what the layer keeps of a pass as it was.
    """
    draw = np.random.default_rng(seed)
    weights = draw.standard_normal((len(at), x.shape[-1]))
    leaves = {name: tensor.detach() for name, tensor in _named(layer, x)}
    found, blocks = _gradients(layer, leaves, at, weights, within)
    tensors = {name: tensor.double().cpu().numpy() for name, tensor in leaves.items()}
    start, gradients = (_pieces(cfg.attention, g) for g in (tensors, found))
    lengths = {name: float(np.linalg.norm(gradient)) for name, gradient in gradients.items()}
    if not all(map(math.isfinite, lengths.values())):
        return math.nan
    # What gets hardly any gradient, or none, has rounding for one: it counts for less.
    least = _LEAST * max(lengths.values())
    lengths = {name: max(length, least) for name, length in lengths.items()}

    def value(along: Mapping[str, Array], step: float) -> float:
        moved = _tensors(cfg.attention, {name: start[name] + step * along[name] for name in start})
        given = moved.pop(_INPUT)
        out, _ = oracle.layer(cfg, moved, given, positions=at, blocks=blocks[:, at])
        return float((weights * (out - given[:, at])[0]).sum())

    off, ways = 0.0, []
    for _ in range(_DIRECTIONS):
        along = {n: draw.standard_normal(v.shape) / lengths[n] for n, v in start.items()}
        step = _FAR * min(max(_size(start[n]), _SMALL) / _size(along[n]) for n in start)
        slope = (value(along, step) - value(along, -step)) / (2 * step)
        off = max(off, abs(_along(gradients, along) - slope) / math.sqrt(len(start)))
        ways.append(along)
    unit = _roundoff(leaves[_INPUT], within)
    if off <= _USUAL * unit:
        return off
    gaps = []
    for number in range(_REPEATS):
        moved = _rounded(leaves, unit, seed + number)
        others = _pieces(cfg.attention, _gradients(layer, moved, at, weights, within)[0])
        gaps += [_along(gradients, along) - _along(others, along) for along in ways]
    rounding = math.sqrt(sum(gap * gap for gap in gaps) / len(gaps) / len(start))
    return max(0.0, off - _ROUNDINGS * rounding)


def _along(gradients: Mapping[str, Array], direction: Mapping[str, Array]) -> float:
    return sum(float((gradients[name] * direction[name]).sum()) for name in direction)


def _named(layer: Layer, x: Tensor) -> list[tuple[str, Tensor]]:
    return [(_INPUT, x), *layer.named_parameters()]


def _pieces(cfg: NSAConfig, tensors: Mapping[str, Array]) -> dict[str, Array]:
    """The tensors, the projection cut into what it makes."""
    whole = dict(tensors)
    projection = whole.pop(_PROJECTION)
    return whole | {p: projection[rows] for p, (rows, _, _) in oracle.in_proj_rows(cfg).items()}


def _tensors(cfg: NSAConfig, pieces: Mapping[str, Array]) -> dict[str, Array]:
    """`_pieces` put together again."""
    whole = dict(pieces)
    return whole | {_PROJECTION: np.concatenate([whole.pop(p) for p in oracle.in_proj_rows(cfg)])}


def _size(x: Array) -> float:
    """Root mean square."""
    return math.sqrt(float(np.square(x).mean()))


def _roundoff(x: Tensor, within: Within) -> float:
    """Of the type that products are computed in."""
    with within():
        half = torch.is_autocast_enabled(x.device.type)
        kind = torch.get_autocast_dtype(x.device.type) if half else x.dtype
    return torch.finfo(kind).eps / 2


def _rounded(leaves: Mapping[str, Tensor], unit: float, seed: int) -> dict[str, Tensor]:
    """Every number moved by about one roundoff."""
    generator = torch.Generator().manual_seed(seed % 2**63)
    return {
        name: leaf * (1 + unit * torch.randn(leaf.shape, generator=generator).to(leaf))
        for name, leaf in leaves.items()
    }


def _gradients(
    layer: Layer,
    tensors: Mapping[str, Tensor],
    at: NDArray[np.int64],
    weights: Array,
    within: Within,
) -> tuple[dict[str, Array], NDArray[np.int64]]:
    """Of the weighted sum of what the layer adds to x, by tensor; and the blocks it chose."""
    attention = layer.attention
    kept = attention.last_gates, attention.last_blocks
    # Tensors of the same memory: nobody hung a hook on these.
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
    device = leaves[_INPUT].device
    places, wanted = (torch.from_numpy(one).to(device) for one in (at, weights))
    with torch.enable_grad(), within():
        own = {name: leaf for name, leaf in leaves.items() if name != _INPUT}
        out: Tensor = functional_call(layer, own, (leaves[_INPUT],))
    total = (out[0, places].double() * wanted).sum()
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    if attention.last_blocks is None:
        raise RuntimeError("a layer keeps its blocks in every forward pass")
    blocks = attention.last_blocks.cpu().numpy()
    attention.last_gates, attention.last_blocks = kept
    gradients = {
        name: np.zeros(leaf.shape) if one is None else one.double().cpu().numpy()
        for (name, leaf), one in zip(leaves.items(), found, strict=True)
    }
    # The residual stream's own share would drown what the layer adds.
    gradients[_INPUT][0, at] -= weights
    return gradients, blocks
