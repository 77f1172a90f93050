"""Starts the kernels of pooling: allocates results, computes grids, never asks the device."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from nsa.attention.triton.between.pool import pool_backward_kernel, pool_kernel
from nsa.attention.triton.launch import device_of, inner
from nsa.attention.triton.tiles import padded
from nsa.config import NSAConfig

# That a program reads, or writes the gradients of, at once: a block of the production shape.
_TOKENS = 32


def constants(cfg: NSAConfig) -> dict[str, int]:
    """What the kernels are compiled for."""
    return {
        "L": cfg.l,
        "STRIDE": cfg.d,
        "D_K": cfg.d_k,
        "D_V": cfg.d_v,
        "WIDTH_K": padded(cfg.d_k),
        "WIDTH_V": padded(cfg.d_v),
        "TOKENS": _TOKENS,
    }


def forward(k: Tensor, v: Tensor, cfg: NSAConfig) -> tuple[Tensor, Tensor]:
    """Means float32 [B,N,G,D] of k [B,S,G,Dk] and v [B,S,G,Dv]."""
    batch, seq_len, groups = k.shape[:3]
    n_blocks = cfg.n_compressed(seq_len)
    k, v = inner(k), inner(v)
    pooled_k, pooled_v = (
        torch.empty(batch, n_blocks, groups, x.shape[-1], dtype=torch.float32, device=x.device)
        for x in (k, v)
    )
    if n_blocks:
        with device_of(k):
            pool_kernel[n_blocks, batch * groups, 2](
                k, v, pooled_k, pooled_v, n_blocks, groups, *k.stride()[:3], *v.stride()[:3],
                **constants(cfg),
            )  # fmt: skip
    return pooled_k, pooled_v


def backward(
    grad_k: Tensor, grad_v: Tensor, seq_len: int, dtype: torch.dtype, cfg: NSAConfig
) -> tuple[Tensor, Tensor]:
    """Gradients of k and v [B,S,G,D] of a type from those of their means; equal bits each time."""
    batch, n_blocks, groups = grad_k.shape[:3]
    grad_k, grad_v = grad_k.contiguous(), grad_v.contiguous()
    dk, dv = (
        torch.empty(batch, seq_len, groups, x.shape[-1], dtype=dtype, device=x.device)
        for x in (grad_k, grad_v)
    )
    with device_of(dk):
        pool_backward_kernel[triton.cdiv(seq_len, _TOKENS), batch * groups, 2](
            grad_k, grad_v, dk, dv, seq_len, n_blocks, groups, **constants(cfg)
        )
    return dk, dv
