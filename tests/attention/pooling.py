"""Proofs of the kernels that pool keys and values, for `between_in_interpreter`.

The truth is NumPy's, in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nsa.attention.selection import mean_pool
from nsa.attention.triton import between as between_launch
from nsa.attention.triton import operators
from nsa.config import NSAConfig
from tests.attention.triton_kernels import (
    BOUND,
    checked,
    compare,
    far_apart,
    poisoned,
    written_once,
)

HALF = torch.float16


@dataclass(frozen=True, kw_only=True)
class Pooled:
    """Keys and values, and the means of them."""

    seq_len: int
    l: int  # noqa: E741
    d: int
    groups: int = 1
    batch: int = 1
    d_k: int = 16
    d_v: int = 16
    dtype: torch.dtype = torch.float32

    def config(self) -> NSAConfig:
        """The package's config for it."""
        return NSAConfig(
            dim=8, n_heads=self.groups, n_kv_groups=self.groups, d_k=self.d_k, d_v=self.d_v,
            l=self.l, d=self.d, l_sel=self.d, n_sel=3,
        )  # fmt: skip

    def tensors(self) -> list[Tensor]:
        """Keys and values as columns of a wider tensor, and gradients of their means."""
        draw = torch.Generator().manual_seed(self.seq_len)
        n_blocks = self.config().n_compressed(self.seq_len)

        def normal(length: int, width: int) -> Tensor:
            shape = (self.batch, length, self.groups, width + 3)
            return torch.randn(shape, generator=draw)

        given = [normal(self.seq_len, w).to(self.dtype)[..., 1:-2] for w in (self.d_k, self.d_v)]
        return given + [normal(n_blocks, w)[..., 3:] for w in (self.d_k, self.d_v)]


# Between them: blocks that overlap by none, one and two others, that end with a tile of tokens or
# not, tokens behind the last block, no block at all, widths that fill no power of two.
POOLED = (
    Pooled(seq_len=75, l=32, d=16, groups=2, batch=2, d_k=24, d_v=5),
    Pooled(seq_len=123, l=45, d=15, groups=3, d_k=7),
    Pooled(seq_len=66, l=4, d=4, d_k=128, d_v=64, dtype=HALF),
    Pooled(seq_len=64, l=64, d=16, dtype=HALF),
    Pooled(seq_len=9, l=10, d=5, batch=2),
)


def pooled_right(case: Pooled, tensors: list[Tensor]) -> list[Tensor]:
    """Means and gradients in float64."""
    found = []
    for x, grad in zip(tensors[:2], tensors[2:], strict=True):
        numbers, backward = x.double().numpy(), grad.double().numpy()
        means, d_x = np.zeros(backward.shape), np.zeros(numbers.shape)
        for i in range(backward.shape[1]):
            tokens = slice(i * case.d, i * case.d + case.l)
            means[:, i] = numbers[:, tokens].mean(1)
            d_x[:, tokens] += backward[:, i, None] / case.l
        found += [torch.from_numpy(means), torch.from_numpy(d_x)]
    return [found[n] for n in (0, 2, 1, 3)]


def pooled_by(launch: ModuleType, case: Pooled, tensors: list[Tensor]) -> list[Tensor]:
    """The same by the kernels."""
    k, v, *grads = tensors
    means = launch.pool_forward(k, v, case.config())
    return [*means, *launch.pool_backward(*grads, case.seq_len, case.dtype, case.config())]


def pool_values(launch: ModuleType = between_launch) -> list[str]:
    """What the kernels of `launch` compute wrongly, write twice, or leave unwritten."""
    problems: list[str] = []
    for case in POOLED:
        tensors = case.tensors()
        with written_once(problems), poisoned():
            mine = pooled_by(launch, case, tensors)
        rights = pooled_right(case, tensors)
        for name, got, right in zip(("k", "v", "dk", "dv"), mine, rights, strict=True):
            kind = case.dtype if name[0] == "d" else torch.float32
            if right.numel():
                problems += compare(f"{name} of {case}", got.double(), right, BOUND[kind])
            if got.dtype != kind or got.shape != right.shape or not got.is_contiguous():
                problems.append(f"{name} of {case} is {got.dtype}, {got.shape}")
        if problems:
            break
    return problems


def pool_operator() -> list[str]:
    """torch's own checks and one graph; the means are those of `mean_pool`, of no block too."""
    case = Pooled(seq_len=21, l=8, d=4, groups=2)
    k, v, *grads = case.tensors()
    leaves = [x.contiguous().requires_grad_() for x in (k, v)]
    cfg = case.config()

    def call(*given: Tensor) -> Tensor:
        return torch.cat(operators.pool(*given, cfg.l, cfg.d), -1)

    kept = [x.contiguous() for x in grads]
    problems: list[str] = checked(
        call, leaves, torch.cat(grads, -1), (operators.pool, (*leaves, cfg.l, cfg.d)),
        (operators.pool_backward, (*kept, 21, torch.float32, cfg.l, cfg.d)),
    )  # fmt: skip
    for length in (21, 3):
        short = torch.cat((k, v), -1)[:, :length]
        problems += ["mean_pool"] * (not torch.allclose(
            call(k[:, :length], v[:, :length]), mean_pool(short, cfg), rtol=0, atol=1e-6
        ))  # fmt: skip
    return problems


def pool_far(launch: ModuleType = between_launch) -> list[str]:
    """Offsets beyond 32 bits: tokens that lie 2^27 numbers apart."""
    case = Pooled(seq_len=40, l=32, d=8, dtype=HALF)
    given = case.tensors()
    with far_apart(given[:2], [1 << 27] * 2) as far:
        mine = pooled_by(launch, case, [*far, *given[2:]])
    near = pooled_by(between_launch, case, given)
    return [f"{n} differs" for n in range(4) if not torch.equal(mine[n], near[n])]


PROOFS: dict[str, Any] = {one.__name__: one for one in (pool_values, pool_operator, pool_far)}
