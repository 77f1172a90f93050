"""The window branch as operators of torch: `nsa::window` and `nsa::window_backward`.

They take numbers instead of a config, because an operator's arguments are tensors and numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa.config import NSAConfig

# What it is to profilers and dispatch modes.
WINDOW_OPERATOR = "window"


def _config(q: Tensor, v: Tensor, w: int) -> NSAConfig:
    """What the kernels read of a config, with the numbers of these tensors."""
    groups, heads, d_k = q.shape[2:]
    return NSAConfig(
        dim=1, n_heads=groups * heads, n_kv_groups=groups, d_k=d_k, d_v=v.shape[-1], w=w
    )


@torch.library.custom_op(f"nsa::{WINDOW_OPERATOR}", mutates_args=())
def window(q: Tensor, k: Tensor, v: Tensor, w: int) -> tuple[Tensor, Tensor]:
    """Output [B,S,G,h,Dv] and log-sum-exp to the base 2 [B*G, S*h] of q [B,S,G,h,Dk]."""
    from nsa.attention.triton import window_launch

    return window_launch.forward(q, k, v, _config(q, v, w))


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
    from nsa.attention.triton import window_launch

    return window_launch.backward(grad, q, k, v, out, lse, _config(q, v, w))


@window_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, w: int
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, w = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.w = w
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 4
    return (*window_backward(grad, *ctx.saved_tensors, ctx.w), None)


window.register_autograd(_backward, setup_context=_keep)


def attend_window(q: Tensor, k: Tensor, v: Tensor, cfg: NSAConfig) -> Tensor:
    """Window branch [B,S,G,h,Dv] of q [B,S,G,h,Dk] on k, v [B,S,G,D]."""
    out: Tensor = window(q, k, v, cfg.w)[0]
    return out
