"""Starts the window's kernels: allocates results, computes grids, never asks the device."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from nsa.attention.triton.launch import (
    device_of,
    head_constants,
    how,
    inner,
    results_of,
    scale_of,
    strides_of,
)
from nsa.attention.triton.tuned import tuned
from nsa.attention.triton.window.keys import window_keys_kernel, window_sum_kernel
from nsa.attention.triton.window.rows import window_kernel, window_query_kernel
from nsa.attention.triton.window.tiles import WindowCut, choose_window_cut
from nsa.config import NSAConfig

# That a program adds up: eight for each thread.
NUMBERS = 1024


def constants(cfg: NSAConfig, cut: WindowCut) -> dict[str, int]:
    """What the window's kernels are compiled for."""
    return head_constants(cfg) | {"KEYS": cut.keys}


def forward(q: Tensor, k: Tensor, v: Tensor, cfg: NSAConfig) -> tuple[Tensor, Tensor]:
    """Output [B,S,G,h,Dv] and log-sum-exp to the base 2 [B*G, S*h] of q [B,S,G,h,Dk]."""
    batch, seq_len, groups, heads = q.shape[:4]
    q, k, v = (inner(x) for x in (q, k, v))
    out, lse = results_of(q, cfg, q.dtype)
    cut = tuned("window", choose_window_cut(cfg, seq_len, batch * groups), cfg, q)
    with device_of(q):
        window_kernel[triton.cdiv(seq_len * heads, cut.forward.rows), batch * groups](
            q, k, v, out, lse, seq_len, groups, min(cfg.w, seq_len), scale_of(cfg),
            *strides_of(q, k, v), **constants(cfg, cut), **how(cut.forward),
        )  # fmt: skip
    return out, lse


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cfg: NSAConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q [B,S,G,h,Dk], k [B,S,G,Dk] and v [B,S,G,Dv]; equal bits for equal inputs."""
    batch, seq_len, groups, heads = q.shape[:4]
    pairs, w = batch * groups, min(cfg.w, seq_len)
    q, k, v = (inner(x) for x in (q, k, v))
    grad, out = grad.contiguous(), out.contiguous()
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    delta = torch.empty_like(lse)
    cut = tuned("window", choose_window_cut(cfg, seq_len, pairs), cfg, q)
    shape, scale, strides = constants(cfg, cut), scale_of(cfg), strides_of(q, k, v)
    with device_of(q):
        window_query_kernel[triton.cdiv(seq_len * heads, cut.query_gradient.rows), pairs](
            q, k, v, out, lse, grad, dq, delta, seq_len, groups, w, scale, cfg.d_k**-0.5,
            *strides, **shape, **how(cut.query_gradient),
        )  # fmt: skip
        into = (dk, dv) if cut.pieces == 1 else _parts(dk, dv, cut.pieces)
        window_keys_kernel[triton.cdiv(seq_len, cut.keys), pairs, cut.pieces](
            q, k, v, grad, lse, delta, *into, seq_len, groups, w, scale, cfg.d_k**-0.5,
            *strides, **shape, **how(cut.key_gradient),
        )  # fmt: skip
        if cut.pieces > 1:
            most = max(dk.numel(), dv.numel())
            window_sum_kernel[triton.cdiv(most, NUMBERS), 2](
                *into, dk, dv, dk.numel(), dv.numel(), PIECES=cut.pieces, NUMBERS=NUMBERS
            )
    return dq, dk, dv


def _parts(dk: Tensor, dv: Tensor, pieces: int) -> tuple[Tensor, Tensor]:
    """Room for what each piece of a walk adds to the gradients of keys and values."""
    parts_k, parts_v = (
        torch.empty(pieces, *x.shape, dtype=torch.float32, device=x.device) for x in (dk, dv)
    )
    return parts_k, parts_v
