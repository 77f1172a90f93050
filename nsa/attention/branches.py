"""The tensors of one attention call, together, in the two layouts that are used."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from nsa.attention.shapes import split_dim
from nsa.config import NSAConfig


@dataclass(frozen=True, kw_only=True)
class Branches:
    """q [B,S,H,Dk], keys [B,S,G,Dk] and values [B,S,G,Dv] of each branch, gates [B,S,H,3].

    k_cmp and v_cmp are raw ([B,S,G,D]) for phi "avg" and compressed ([B,N,G,D]) for phi "mlp".
    """

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

    def to(self, dtype: torch.dtype) -> Branches:
        """The same tensors in another type."""
        return Branches(**{name: tensor.to(dtype) for name, tensor in self.named().items()})

    def grouped(self, cfg: NSAConfig) -> Grouped:
        """Views of the same tensors, group before token."""
        found = {}
        for name, x in self.named().items():
            x = split_dim(x, 2, cfg.heads_per_group) if name in ("q", "gates") else x
            found[name] = x.transpose(1, 2)
        return Grouped(**found)


@dataclass(frozen=True, kw_only=True)
class Grouped:
    """The same, group before token: q [B,G,S,h,Dk], gates [B,G,S,h,3], keys, values [B,G,T,D].

    h query heads share a group. Laid out contiguously like this, a group's queries are the rows
    of one matrix.
    """

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

    def to(self, dtype: torch.dtype) -> Grouped:
        """The same tensors in another type."""
        return Grouped(**{name: tensor.to(dtype) for name, tensor in self.named().items()})

    def flat(self) -> Branches:
        """Token before group, heads in one dimension."""
        found = {}
        for name, x in self.named().items():
            x = x.transpose(1, 2)
            found[name] = x.flatten(2, 3) if name in ("q", "gates") else x
        return Branches(**found)
