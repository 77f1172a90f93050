"""AdamW's equation in float64, written down again: of elements, and of sums of all of them.

Drawn elements miss a row that none of them lies in. In sums with random signs each element counts,
and they are linear: the sums of a mean over ranks are the mean of the ranks' sums. One whose
elements are independent comes out about as large as an element.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from nsa.attention.selection import full_float32

# What the optimizer has to be, beside what the config says: written down again, not read from it.
_BETAS, _EPS = (0.9, 0.95), 1e-8
# The update itself takes some ten roundings more than adding it to the weight does.
_UPDATE_ROUNDINGS = 16
# Squares of what is smaller than this underflow in float32, and are far below epsilon.
_FLOOR = 1e-30
# Whole numbers of so many bytes.
_WHOLE = {2: torch.int16, 4: torch.int32, 8: torch.int64}
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


def updated(
    before: Tensor, gradient: Tensor, *, rate: float, decay: Tensor, count: Tensor
) -> tuple[Tensor, Tensor]:
    """Weight and moments [3, N] after an update, and the sizes that its roundings are shares of."""
    weight, first, second = before
    beta1, beta2 = _BETAS
    first_new = beta1 * first + (1 - beta1) * gradient
    second_new = beta2 * second + (1 - beta2) * gradient.square()
    root = (second_new / (1 - beta2**count)).sqrt() + _EPS
    way = rate / (1 - beta1**count)
    weight_new = weight * (1 - rate * decay) - way * first_new / root
    sizes = beta1 * first.abs() + (1 - beta1) * gradient.abs()
    explained = [weight.abs() + _UPDATE_ROUNDINGS * way * sizes / root, sizes, second_new]
    return torch.stack([weight_new, first_new, second_new]), torch.stack(explained) + _FLOOR


def way_of(parameter: Tensor, entry: Mapping[str, Tensor]) -> Tensor:
    """What the optimizer's moments make of a parameter, but for the rate; 0 without moments."""
    if not entry:
        return torch.zeros_like(parameter)
    left = 1 - _BETAS[1] ** _at_least_one(entry["step"].to(parameter.device))
    root = entry["exp_avg_sq"].sqrt().div_(left.sqrt()).add_(_EPS)
    way: Tensor = entry["exp_avg"] / root
    return way


def moved(
    before: Tensor, way: Tensor, sizes: Tensor, *, rate: Tensor, decay: Tensor, count: Tensor
) -> tuple[Tensor, Tensor]:
    """Sums [P, n] of all weights after an update, and the sizes that roundings are shares of.

    before, way: sums of weights and of `way_of`. sizes [P, 2]: the root mean squares of `way_of`
    and of the weights. rate, decay, count: of each parameter [P].
    """
    share = rate / (1 - _BETAS[0] ** _at_least_one(count))
    wanted = before * (1 - rate * decay)[:, None] - way * share[:, None]
    explained = sizes[:, 1] + _UPDATE_ROUNDINGS * share * sizes[:, 0] + _FLOOR
    return wanted, explained[:, None]


def whole_rms(x: Tensor) -> Tensor:
    """Root mean square of all elements, in float64."""
    norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.float64)
    return norm / math.sqrt(x.numel())


def _at_least_one(count: Tensor) -> Tensor:
    """So many updates in float64; a parameter that had none does not move, whatever is divided."""
    return count.to(torch.float64).clamp_min(1)
