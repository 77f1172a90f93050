"""Rotary position embedding: neighbouring components turn together as one complex number."""

from __future__ import annotations

import torch
from torch import Tensor


def rotations(positions: Tensor, d: int, base: float, dtype: torch.dtype) -> Tensor:
    """Unit complex numbers [S, d/2] that turn a vector of even width d at each position.

    `dtype` is the real type of the vectors (half types use complex64). Angles are computed in
    float64, so that far positions stay exact.
    """
    frequency = base ** (-torch.arange(0, d, 2, dtype=torch.float64, device=positions.device) / d)
    angle = positions.to(torch.float64)[:, None] * frequency
    kind = torch.complex128 if dtype == torch.float64 else torch.complex64
    return torch.polar(torch.ones_like(angle), angle).to(kind)


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Rotate x [B,S,...,d] by turns [S, d/2]; same shape and type.

    The product q.k of two rotated vectors depends on their positions only through the
    difference.
    """
    real = torch.float64 if x.dtype == torch.float64 else torch.float32
    pairs = torch.view_as_complex(x.to(real).unflatten(-1, (-1, 2)).contiguous())
    shape = (turns.shape[0], *(1,) * (x.dim() - 3), turns.shape[1])
    return torch.view_as_real(pairs * turns.view(shape)).flatten(-2).to(x.dtype)
