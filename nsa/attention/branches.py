"""The tensors of one attention call: two layouts, what callers may hand in, how queries are cut.

A wrong call is refused with everything wrong in one message.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.contract import raise_problems

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


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


def check_attention_inputs(named: dict[str, Tensor], cfg: NSAConfig) -> None:
    """Raise NSAError unless all eight tensors fit the config and each other."""
    q, errors = named["q"], []
    if q.dim() != 4 or 0 in q.shape[:2] or tuple(q.shape[2:]) != (cfg.n_heads, cfg.d_k):
        want = f"[B,S,H,Dk] with B and S at least 1, H={cfg.n_heads}, Dk={cfg.d_k}"
        errors.append(f"q has shape {tuple(q.shape)}: must be {want}")
    else:
        batch, seq_len = q.shape[:2]
        n_keys = seq_len if cfg.phi == "avg" else cfg.n_compressed(seq_len)
        expected = {"gates": (batch, seq_len, cfg.n_heads, 3)}
        for branch, rows in (("cmp", n_keys), ("sel", seq_len), ("win", seq_len)):
            for kind, width in (("k", cfg.d_k), ("v", cfg.d_v)):
                expected[f"{kind}_{branch}"] = (batch, rows, cfg.n_kv_groups, width)
        errors += [
            f"{name} has shape {tuple(named[name].shape)}: must be {shape}"
            for name, shape in expected.items()
            if tuple(named[name].shape) != shape
        ]
    if q.dtype not in _DTYPES:
        errors.append(f"q is {q.dtype}: must be one of {', '.join(map(str, _DTYPES))}")
    errors += [
        f"{name} is {x.dtype} on {x.device} but q is {q.dtype} on {q.device}: make them alike"
        for name, x in named.items()
        if (x.dtype, x.device) != (q.dtype, q.device)
    ]
    raise_problems("nsa_attention", errors)


# What the scores, or the mask, of one chunk of queries may take. At S = 2,048 of the production
# shape all queries of 16 sequences are one chunk: more chunks are more launches and nothing else.
CHUNK_BYTES = 256 << 20


def chunks(start: int, stop: int, row_bytes: int) -> list[tuple[int, int]]:
    """Cut queries [start, stop) evenly, so that the rows of each chunk fit `CHUNK_BYTES`."""
    total = stop - start
    size = max(1, -(-total // max(1, -(-total * row_bytes // CHUNK_BYTES))))
    return [(at, min(at + size, stop)) for at in range(start, stop, size)]
