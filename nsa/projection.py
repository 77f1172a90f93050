"""From one product of the layer's input to turned queries and keys, values and gates.

Rotary positions: neighboring components of a vector turn together as one complex number.

One matrix product makes everything; its result is cut apart, and queries and keys are turned by
their positions, all in few and large operators, for a device that waits for its host.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import pad

from nsa.attention.branches import Branches, Grouped, split_dim
from nsa.attention.selection import accumulate_dtype
from nsa.config import NSAConfig

# Column order of the product.
PARTS = ("q", "k_cmp", "k_sel", "k_win", "v_cmp", "v_sel", "v_win", "gates")


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Where each part lies among the columns of the product, heads side by side."""

    cfg: NSAConfig

    def shape(self, part: str) -> tuple[int, int]:
        """(heads, width of a head) of a part."""
        cfg = self.cfg
        if part == "q":
            return cfg.n_heads, cfg.d_k
        if part == "gates":
            return cfg.n_heads, 3
        return cfg.n_kv_groups, cfg.d_k if part[0] == "k" else cfg.d_v

    @property
    def widths(self) -> list[int]:
        """Columns of each part."""
        return [heads * width for heads, width in map(self.shape, PARTS)]

    @property
    def slices(self) -> dict[str, slice]:
        """Column slice of each part."""
        ends = accumulate(self.widths)
        return {p: slice(e - w, e) for p, e, w in zip(PARTS, ends, self.widths, strict=True)}

    @property
    def total(self) -> int:
        """Columns in all."""
        return sum(self.widths)


def rotations(positions: Tensor, d: int, base: float, dtype: torch.dtype) -> Tensor:
    """Unit complex numbers [S, d/2] that turn a vector of even width d at each position.

    `dtype` is the real type of the vectors (half types use complex64). Angles are computed in
    float64, so that far positions stay exact.
    """
    frequency = base ** (-torch.arange(0, d, 2, dtype=torch.float64, device=positions.device) / d)
    angle = positions.to(torch.float64)[:, None] * frequency
    kind = torch.complex128 if dtype == torch.float64 else torch.complex64
    return torch.polar(torch.ones_like(angle), angle).to(kind)


def _pairs(x: Tensor) -> Tensor:
    return torch.view_as_complex(split_dim(x, x.dim() - 1, 2))


def aligned(weight: Tensor) -> Tensor:
    """A weight [N, dim] with zero rows up to a multiple of 8.

    A product's rows then begin at multiples of 16 bytes in half types, without which libraries
    leave out their fastest kernels. What is stored and differentiated is the weight as it is.
    """
    return pad(weight, (0, 0, 0, -weight.shape[0] % 8)) if weight.shape[0] % 8 else weight


def split_projection(y: Tensor, gate_bias: Tensor, turns: Tensor, cfg: NSAConfig) -> Grouped:
    """Cut y [B,S,Columns.total] apart: keys and queries turned, gates through the sigmoid.

    Columns of y beyond Columns.total are those of `aligned`, of no use here. What comes is token
    before group in memory.

    Queries and the keys of all branches lie side by side, so that one product turns them all; two
    vectors turned like this have a product that depends on their positions only through the
    difference. turns [S, d_k/2] complex, or [S, d_k/2, 2] as real numbers, for a compiler that
    knows no others.
    """
    wide, groups = accumulate_dtype(y.dtype), [cfg.n_kv_groups] * 3
    heads = [cfg.n_heads, *groups]
    widths = [sum(heads) * cfg.d_k, sum(groups) * cfg.d_v, 3 * cfg.n_heads]
    turned, values, gates, *_ = y.split_with_sizes([*widths, y.shape[-1] - sum(widths)], -1)
    source = split_dim(turned.to(wide).contiguous(), 2, cfg.d_k)
    if turns.is_complex():
        turned = torch.view_as_real(_pairs(source) * turns[:, None]).flatten(-2).to(y.dtype)
    else:
        turned = _turn_real(source, turns).to(y.dtype)
    opened = (gates.to(wide) + gate_bias.to(wide)).sigmoid().to(y.dtype)
    # Their columns are not aligned for the kernels that load 16 bytes at a time.
    values = split_dim(values.contiguous(), 2, cfg.d_v)
    parts = (
        *turned.split_with_sizes(heads, 2),
        *values.split_with_sizes(groups, 2),
        split_dim(opened, 2, 3),
    )
    return Branches(**dict(zip(PARTS, parts, strict=True))).grouped(cfg)


def _turn_real(source: Tensor, turns: Tensor) -> Tensor:
    even, odd = split_dim(source, 3, 2).unbind(-1)
    cos, sin = turns[:, None].unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
