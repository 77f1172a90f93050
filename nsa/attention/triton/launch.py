"""What every launch of kernels needs: room for results, strides, the device."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from nsa.attention.triton.tiles import Tile, padded, register_limit
from nsa.config import NSAConfig

_LOG2_E = math.log2(math.e)


def results_of(q: Tensor, cfg: NSAConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Room for the output [B,S,G,h,Dv] and the log-sum-exp [B*G, S*h] of q [B,S,G,h,Dk]."""
    batch, seq_len, groups, heads = q.shape[:4]
    out = torch.empty(batch, seq_len, groups, heads, cfg.d_v, dtype=dtype, device=q.device)
    lse = torch.empty(batch * groups, seq_len * heads, dtype=torch.float32, device=q.device)
    return out, lse


def inner(x: Tensor) -> Tensor:
    """Kernels step through the last dimension by one; the others lie as they are."""
    return x if x.stride(-1) == 1 else x.contiguous()


def strides_of(q: Tensor, k: Tensor, v: Tensor) -> list[int]:
    """Of q [B,S,G,h,Dk] and of k, v [B,T,G,D], the last dimensions' left out."""
    return [*q.stride()[:4], *k.stride()[:3], *v.stride()[:3]]


def how(tile: Tile) -> dict[str, int]:
    """A tile as a kernel is told of it, on the current device."""
    told = {"ROWS": tile.rows, "num_warps": tile.warps, "num_stages": tile.stages}
    major = torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 0
    limit = register_limit(major)
    return told if limit is None else {**told, "maxnreg": limit}


def scale_of(cfg: NSAConfig) -> float:
    """Scores to the base 2."""
    return float(cfg.d_k**-0.5 * _LOG2_E)


def device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Kernels start on the current device: make it the tensor's."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def head_constants(cfg: NSAConfig) -> dict[str, int]:
    """What kernels of all branches are compiled for: heads, and what they are padded to."""
    return {
        "HEADS": cfg.heads_per_group,
        "D_K": cfg.d_k,
        "D_V": cfg.d_v,
        "WIDTH_K": padded(cfg.d_k),
        "WIDTH_V": padded(cfg.d_v),
    }
