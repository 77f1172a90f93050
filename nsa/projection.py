"""From one product of the layer's input to turned queries and keys, values and gates.

Rotary positions: neighboring components of a vector turn together as one complex number.

One matrix product makes everything; its result is cut apart, and queries and keys are turned by
their positions. `split_projection` lays all of it out group by group, which is how attention on a
CPU reads it, and its backward pass writes each gradient straight into its columns of one matrix.
`split_together` gives the same in few and large operators, for a device that waits for its host.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
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

    def cut(self, y: Tensor) -> dict[str, Tensor]:
        """Views of y [B,S,total] by part: q, gates [B,G,S,h,width], the others [B,G,S,width]."""
        views, groups = {}, self.cfg.n_kv_groups
        for part, view in zip(PARTS, y.split_with_sizes(self.widths, -1), strict=True):
            heads, width = self.shape(part)
            share = (heads // groups,) if part in ("q", "gates") else ()
            views[part] = view.view(*y.shape[:2], groups, *share, width).transpose(1, 2)
        return views


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
    """Whether neighboring components can be viewed as complex numbers where they lie."""
    *outer, inner = x.stride()
    return inner == 1 and not any(s & 1 for s in (x.storage_offset(), *outer))


def _pairs(x: Tensor) -> Tensor:
    return torch.view_as_complex(split_dim(x, x.dim() - 1, 2))


class _Split(torch.autograd.Function):
    """y [B,S,total], gate bias [H*3] and turns [S, d_k/2] to the parts, contiguous."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, gate_bias: Tensor, turns: Tensor, cfg: NSAConfig
    ) -> tuple[Tensor, ...]:
        """Queries and keys turned, values copied, gates through the sigmoid."""
        parts: list[Tensor] = []
        for name, source in Columns(cfg=cfg).cut(y).items():
            target = y.new_empty(source.shape)
            if name == "gates":
                bias = gate_bias.to(y.dtype).view(cfg.n_kv_groups, 1, -1, 3)
                torch.add(source, bias, out=target).sigmoid_()
            elif name[0] == "v":
                target.copy_(source)
            else:
                rotate_into(source, turns, target)
            parts.append(target)
        ctx.cfg, ctx.bias_dtype = cfg, gate_bias.dtype
        ctx.save_for_backward(turns, parts[-1])
        return tuple(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradient of y, each part written into its columns, and of the gate bias."""
        turns, gates = ctx.saved_tensors
        cfg: NSAConfig = ctx.cfg
        columns = Columns(cfg=cfg)
        batch, seq_len = gates.shape[0], gates.shape[2]
        dy = gates.new_empty(batch, seq_len, columns.total)
        back, views = turns.conj().resolve_conj(), columns.cut(dy)
        for name, grad in zip(PARTS, grads, strict=True):
            if name == "gates":
                views[name].copy_(grad * gates * (1 - gates))
            elif name[0] == "v":
                views[name].copy_(grad)
            else:
                rotate_into(grad, back, views[name])
        d_bias = views["gates"].sum((0, 2), dtype=ctx.bias_dtype).flatten()
        return dy, d_bias, None, None


def split_projection(y: Tensor, gate_bias: Tensor, turns: Tensor, cfg: NSAConfig) -> Grouped:
    """Cut y [B,S,Columns.total] apart: keys and queries turned by turns [S, d_k/2], gates done."""
    parts = cast(
        "tuple[Tensor, ...]",
        _Split.apply(y, gate_bias, turns, cfg),  # type: ignore[no-untyped-call]
    )
    return Grouped(**dict(zip(PARTS, parts, strict=True)))


def aligned(weight: Tensor) -> Tensor:
    """A weight [N, dim] with zero rows up to a multiple of 8.

    A product's rows then begin at multiples of 16 bytes in half types, without which libraries
    leave out their fastest kernels. What is stored and differentiated is the weight as it is.
    """
    return pad(weight, (0, 0, 0, -weight.shape[0] % 8)) if weight.shape[0] % 8 else weight


def split_together(y: Tensor, gate_bias: Tensor, turns: Tensor, cfg: NSAConfig) -> Grouped:
    """The same as `split_projection`, token before group in memory, by a third of the operators.

    Columns of y beyond Columns.total are those of `aligned`, of no use here.

    Queries and the keys of all branches lie side by side, so that one product turns them all. turns
    [S, d_k/2] complex, or [S, d_k/2, 2] as real numbers, for a compiler that knows no others.
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
