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


def _shape_error(name: str, tensor: Tensor, letters: str, expected: tuple[int, ...]) -> list[str]:
    if tuple(tensor.shape) == expected:
        return []
    return [f"{name} has shape {tuple(tensor.shape)}: must be {letters} = {expected}"]


def _kind_errors(named: dict[str, Tensor]) -> list[str]:
    q = named["q"]
    errors = []
    if q.dtype not in _DTYPES:
        errors.append(f"q is {q.dtype}: must be one of {', '.join(map(str, _DTYPES))}")
    for name, tensor in named.items():
        if tensor.dtype != q.dtype:
            errors.append(f"{name} is {tensor.dtype} but q is {q.dtype}: cast them to one type")
        if tensor.device != q.device:
            errors.append(
                f"{name} is on {tensor.device} but q is on {q.device}: move them together"
            )
    return errors


def check_attention_inputs(named: dict[str, Tensor], cfg: NSAConfig) -> None:
    """Raise NSAError unless all eight tensors fit the config and each other."""
    q = named["q"]
    shape_errors = _query_errors(q, cfg)
    if not shape_errors:
        batch, seq_len = q.shape[:2]
        raw = cfg.phi == "avg"
        length, letters = (seq_len, "S") if raw else (cfg.n_compressed(seq_len), "N")
        for branch in ("cmp", "sel", "win"):
            rows, row_letters = (length, letters) if branch == "cmp" else (seq_len, "S")
            for kind, width in (("k", cfg.d_k), ("v", cfg.d_v)):
                name = f"{kind}_{branch}"
                expected = (batch, rows, cfg.n_kv_groups, width)
                label = f"[B,{row_letters},G,D{kind}]"
                shape_errors += _shape_error(name, named[name], label, expected)
        expected = (batch, seq_len, cfg.n_heads, 3)
        shape_errors += _shape_error("gates", named["gates"], "[B,S,H,3]", expected)
    raise_problems("nsa_attention", shape_errors + _kind_errors(named))


def _query_errors(q: Tensor, cfg: NSAConfig) -> list[str]:
    if q.dim() != 4 or tuple(q.shape[2:]) != (cfg.n_heads, cfg.d_k):
        want = f"[B,S,H,Dk] with H={cfg.n_heads}, Dk={cfg.d_k}"
        return [f"q has shape {tuple(q.shape)}: must be {want}"]
    if q.shape[0] < 1 or q.shape[1] < 1:
        return [f"q has shape {tuple(q.shape)}: batch and sequence must hold at least one element"]
    return []


# What the scores, or the mask, of one chunk of queries may take. At S = 2,048 of the production
# shape all queries of 16 sequences are one chunk: more chunks are more launches and nothing else.
CHUNK_BYTES = 256 << 20


def chunks(start: int, stop: int, row_bytes: int) -> list[tuple[int, int]]:
    """Cut queries [start, stop) evenly, so that the rows of each chunk fit `CHUNK_BYTES`."""
    total = stop - start
    size = max(1, -(-total // max(1, -(-total * row_bytes // CHUNK_BYTES))))
    return [(at, min(at + size, stop)) for at in range(start, stop, size)]
