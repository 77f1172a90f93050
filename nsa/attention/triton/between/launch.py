"""Starts the kernels of pooling and of the gated sum; never asks the device for a number."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from nsa.attention.triton.between.mix import mix_backward_kernel, mix_kernel
from nsa.attention.triton.between.pool import pool_backward_kernel, pool_kernel
from nsa.attention.triton.launch import device_of, inner
from nsa.attention.triton.tiles import padded
from nsa.config import NSAConfig

# Tokens that a program of pooling reads, or writes the gradients of, at once: a block of the
# production shape.
_TOKENS = 32
# Numbers of a branch that a program of the sum takes: 16 for each thread, and several programs for
# each multiprocessor from 2,000 tokens of the production shape on.
_NUMBERS = 2048


def pool_constants(cfg: NSAConfig) -> dict[str, int]:
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


def pool_forward(k: Tensor, v: Tensor, cfg: NSAConfig) -> tuple[Tensor, Tensor]:
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
                **pool_constants(cfg),
            )  # fmt: skip
    return pooled_k, pooled_v


def pool_backward(
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
            grad_k, grad_v, dk, dv, seq_len, n_blocks, groups, **pool_constants(cfg)
        )
    return dk, dv


def mix_constants(heads: int, d_v: int) -> dict[str, int]:
    """What the kernels are compiled for; heads: of all groups."""
    width = padded(d_v)
    return {"HEADS": heads, "D_V": d_v, "WIDTH_V": width, "ROWS": max(1, _NUMBERS // width)}


def mix_forward(cmp: Tensor, sel: Tensor, win: Tensor, gates: Tensor) -> Tensor:
    """Output [B,S,H,Dv], in the type of the gates [B,S,H,3], of branches [B,S,H,Dv]."""
    tensors = [inner(x) for x in (cmp, sel, win, gates)]
    out = torch.empty(cmp.shape, dtype=gates.dtype, device=gates.device)
    grid, told = _how(out)
    with device_of(out):
        mix_kernel[grid](*tensors, out, cmp.shape[1], *_strides(tensors), **told)
    return out


def mix_backward(
    grad: Tensor, cmp: Tensor, sel: Tensor, win: Tensor, gates: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the three branches and of the gates, contiguous; equal bits each time."""
    tensors = [inner(x) for x in (grad, cmp, sel, win, gates)]
    d_cmp, d_sel, d_win, d_gates = (
        torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in tensors[1:]
    )
    grid, told = _how(d_cmp)
    with device_of(grad):
        mix_backward_kernel[grid](
            *tensors, d_cmp, d_sel, d_win, d_gates, cmp.shape[1], *_strides(tensors), **told
        )
    return d_cmp, d_sel, d_win, d_gates


def _how(out: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """Grid of a launch for branches like `out`, and what its kernel is compiled for."""
    batch, seq_len, heads, d_v = out.shape
    told = mix_constants(heads, d_v)
    return (triton.cdiv(seq_len * heads, told["ROWS"]), batch), told


def _strides(tensors: list[Tensor]) -> list[int]:
    """Of tensors [B,S,H,D], the last dimensions' left out."""
    return [stride for x in tensors for stride in x.stride()[:3]]
