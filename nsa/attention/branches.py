"""The tensors of one attention call, what callers may hand in, how queries are cut."""

from __future__ import annotations

from dataclasses import dataclass, fields

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
class Branches:
    """q [B,S,H,Dk], keys [B,S,G,Dk] and values [B,S,G,Dv] of each branch, gates [B,S,H,3].

    k_cmp and v_cmp are raw ([B,S,G,D]) for phi "avg", to be pooled, and compressed ([B,N,G,D] with
    N = cfg.n_compressed(S)) for phi "mlp". gates are in [0,1], for the compressed, selected and
    window branch. All are of one type (float64, float32, bfloat16, float16) and device. Rotary
    positions, where wanted, are already applied.
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

    def check(self, cfg: NSAConfig) -> None:
        """Raise NSAError that names every tensor which does not fit the config, and q."""
        q, errors = self.q, []
        batch, seq_len = (max(1, size) for size in q.shape[:2])
        n_keys = seq_len if cfg.phi == "avg" else cfg.n_compressed(seq_len)
        if q.dtype not in _DTYPES:
            errors.append(f"q is {q.dtype}: must be one of {', '.join(map(str, _DTYPES))}")
        for name, x in self.named().items():
            rows = n_keys if name in ("k_cmp", "v_cmp") else seq_len
            wanted = (batch, rows, *part_shape(name, cfg)), q.dtype, q.device
            found = tuple(x.shape), x.dtype, x.device
            if found != wanted:
                given, must = (" ".join(map(str, told)) for told in (found, wanted))
                errors.append(f"{name} is {given}: must be {must}")
        raise_problems("nsa_attention", errors)


def part_shape(part: str, cfg: NSAConfig) -> tuple[int, int]:
    """(heads, width of a head) of a tensor of `Branches`."""
    if part == "q":
        return cfg.n_heads, cfg.d_k
    if part == "gates":
        return cfg.n_heads, 3
    return cfg.n_kv_groups, cfg.d_k if part[0] == "k" else cfg.d_v


# What the scores, or the mask, of one chunk of queries may take. At S = 2,048 of the production
# shape all queries of 16 sequences are one chunk: more chunks are more launches and nothing else.
CHUNK_BYTES = 256 << 20


def chunks(start: int, stop: int, row_bytes: int) -> list[tuple[int, int]]:
    """Cut queries [start, stop) evenly, so that the rows of each chunk fit `CHUNK_BYTES`."""
    total = stop - start
    size = max(1, -(-total // max(1, -(-total * row_bytes // CHUNK_BYTES))))
    return [(at, min(at + size, stop)) for at in range(start, stop, size)]
