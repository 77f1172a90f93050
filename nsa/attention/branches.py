"""The tensors of one attention call, together, in the two layouts that are used."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor

from nsa.config import NSAConfig


def split_dim(x: Tensor, dim: int, inner: int) -> Tensor:
    """View dimension `dim` (not negative) as two, the inner one of size `inner`."""
    shape = list(x.shape)
    shape[dim : dim + 1] = [shape[dim] // inner, inner]
    # A dimension may be split in any layout, so this never copies.
    return x.view(shape)


@dataclass(frozen=True, kw_only=True)
class _Tensors:
    q: Tensor
    k_cmp: Tensor
    v_cmp: Tensor
    k_sel: Tensor
    v_sel: Tensor
    k_win: Tensor
    v_win: Tensor
    gates: Tensor

    def named(self) -> dict[str, Tensor]:
        """The tensors by field name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def to(self, dtype: torch.dtype) -> Self:
        """The same tensors in another type."""
        return type(self)(**{name: tensor.to(dtype) for name, tensor in self.named().items()})


@dataclass(frozen=True, kw_only=True)
class Branches(_Tensors):
    """q [B,S,H,Dk], keys [B,S,G,Dk] and values [B,S,G,Dv] of each branch, gates [B,S,H,3].

    k_cmp and v_cmp are raw ([B,S,G,D]) for phi "avg" and compressed ([B,N,G,D]) for phi "mlp".
    """

    def grouped(self, cfg: NSAConfig) -> Grouped:
        """Views of the same tensors, group before token."""
        found = {}
        for name, x in self.named().items():
            x = split_dim(x, 2, cfg.heads_per_group) if name in ("q", "gates") else x
            found[name] = x.transpose(1, 2)
        return Grouped(**found)


@dataclass(frozen=True, kw_only=True)
class Grouped(_Tensors):
    """The same, group before token: q [B,G,S,h,Dk], gates [B,G,S,h,3], keys, values [B,G,T,D].

    h query heads share a group. Laid out contiguously like this, a group's queries are the rows
    of one matrix.
    """

    def flat(self) -> Branches:
        """Token before group, heads in one dimension."""
        found = {}
        for name, x in self.named().items():
            x = x.transpose(1, 2)
            found[name] = x.flatten(2, 3) if name in ("q", "gates") else x
        return Branches(**found)
