"""The tensors of one attention call, together."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor


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
