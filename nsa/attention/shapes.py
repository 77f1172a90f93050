"""Small typed helpers on tensor shapes."""

from __future__ import annotations

from torch import Tensor


def split_dim(x: Tensor, dim: int, inner: int) -> Tensor:
    """View dimension `dim` (not negative) as two, the inner one of size `inner`."""
    shape = list(x.shape)
    shape[dim : dim + 1] = [shape[dim] // inner, inner]
    # A dimension may be split in any layout, so this never copies.
    return x.view(shape)
