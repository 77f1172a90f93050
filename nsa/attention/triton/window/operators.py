"""The window branch as operators of torch: `nsa::window` and `nsa::window_backward`."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.attention.triton.registered import config_of, differentiate
from nsa.config import NSAConfig

# What it is to profilers and dispatch modes.
WINDOW_OPERATOR = "window"


@torch.library.custom_op(f"nsa::{WINDOW_OPERATOR}", mutates_args=())
def window(q: Tensor, k: Tensor, v: Tensor, w: int) -> tuple[Tensor, Tensor]:
    """Output [B,S,G,h,Dv] and log-sum-exp to the base 2 [B*G, S*h] of q [B,S,G,h,Dk]."""
    from nsa.attention.triton.window import launch as window_launch

    return window_launch.forward(q, k, v, config_of(q, v.shape[-1], w=w))


@window.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, w: int) -> tuple[Tensor, Tensor]:
    batch, seq_len, groups, heads = q.shape[:4]
    out = q.new_empty(batch, seq_len, groups, heads, v.shape[-1])
    return out, q.new_empty(batch * groups, seq_len * heads, dtype=torch.float32)


@torch.library.custom_op("nsa::window_backward", mutates_args=())
def window_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, w: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from that of the output."""
    from nsa.attention.triton.window import launch as window_launch

    return window_launch.backward(grad, q, k, v, out, lse, config_of(q, v.shape[-1], w=w))


@window_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, w: int
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


differentiate(window, window_backward)


def attend_window(q: Tensor, k: Tensor, v: Tensor, cfg: NSAConfig) -> Tensor:
    """Window branch [B,S,G,h,Dv] of q [B,S,G,h,Dk] on k, v [B,S,G,D]."""
    out: Tensor = window(q, k, v, cfg.w)[0]
    return out
