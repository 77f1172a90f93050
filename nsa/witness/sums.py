"""Every element of a gradient in a few numbers: sums with random signs.

Drawn elements miss a row that none of them lies in. In these sums each element counts, and they are
linear: the sums of a mean over ranks are the mean of the ranks' sums. One whose elements are
independent comes out about as large as an element.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from nsa.attention.selection import full_float32

# Elements that are widened to float64 at a time.
_AT_ONCE = 1 << 20


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
