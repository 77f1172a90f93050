"""Rotary position embedding: neighbouring components turn together as one complex number."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.attention.shapes import split_dim


def rotations(positions: Tensor, d: int, base: float, dtype: torch.dtype) -> Tensor:
    """Unit complex numbers [S, d/2] that turn a vector of even width d at each position.

    `dtype` is the real type of the vectors (half types use complex64). Angles are computed in
    float64, so that far positions stay exact.
    """
    frequency = base ** (-torch.arange(0, d, 2, dtype=torch.float64, device=positions.device) / d)
    angle = positions.to(torch.float64)[:, None] * frequency
    kind = torch.complex128 if dtype == torch.float64 else torch.complex64
    return torch.polar(torch.ones_like(angle), angle).to(kind)


def rotate_into(source: Tensor, turns: Tensor, target: Tensor) -> None:
    """Write source [B,G,S,(h,)d], each position turned by turns [S, d/2], to target.

    The product q.k of two vectors turned like this depends on their positions only through the
    difference. Differentiates nothing; the gradient is the turn back.
    """
    if source.dim() == 5:
        turns = turns[:, None]
    if source.dtype.itemsize < 4:
        target.copy_(torch.view_as_real(_pairs(source.float().contiguous()) * turns).flatten(-2))
    elif _pairable(source) and _pairable(target):
        torch.mul(_pairs(source), turns, out=_pairs(target))
    else:
        target.copy_(torch.view_as_real(_pairs(source.contiguous()) * turns).flatten(-2))


def _pairable(x: Tensor) -> bool:
    """Whether neighbouring components can be viewed as complex numbers where they lie."""
    *outer, inner = x.stride()
    return inner == 1 and x.storage_offset() % 2 == 0 and all(s % 2 == 0 for s in outer)


def _pairs(x: Tensor) -> Tensor:
    return torch.view_as_complex(split_dim(x, x.dim() - 1, 2))
