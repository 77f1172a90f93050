"""Pooling and the gated sum as operators of torch.

`nsa::pool` and `nsa::mix`, each with its `_backward`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa.config import MIN_N_SEL, NSAConfig

# What they are to profilers and dispatch modes.
POOL_OPERATOR, MIX_OPERATOR = "pool", "mix"


def _pool_config(k: Tensor, v: Tensor, l: int, d: int) -> NSAConfig:  # noqa: E741
    """What the kernels read of a config; k and v [B,T,G,D]."""
    groups, d_k = k.shape[2:]
    return NSAConfig(dim=1, n_heads=groups, n_kv_groups=groups, d_k=d_k, d_v=v.shape[-1], l=l, d=d,
                     l_sel=d, n_sel=MIN_N_SEL)  # fmt: skip


@torch.library.custom_op(f"nsa::{POOL_OPERATOR}", mutates_args=())
def pool(k: Tensor, v: Tensor, l: int, d: int) -> tuple[Tensor, Tensor]:  # noqa: E741
    """Compressed keys and values float32 [B,N,G,D]: means of k and v [B,S,G,D]."""
    from nsa.attention.triton.between import launch

    return launch.pool_forward(k, v, _pool_config(k, v, l, d))


@pool.register_fake
def _(k: Tensor, v: Tensor, l: int, d: int) -> tuple[Tensor, Tensor]:  # noqa: E741
    batch, seq_len, groups, d_k = k.shape
    shape = batch, max(0, (seq_len - l) // d + 1), groups
    pooled = k.new_empty(*shape, d_k, dtype=torch.float32)
    return pooled, v.new_empty(*shape, v.shape[-1], dtype=torch.float32)


@torch.library.custom_op("nsa::pool_backward", mutates_args=())
def pool_backward(
    grad_k: Tensor, grad_v: Tensor, seq_len: int, dtype: torch.dtype, l: int, d: int  # noqa: E741
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of k and v [B,seq_len,G,D] from those of their means."""
    from nsa.attention.triton.between import launch

    cfg = _pool_config(grad_k, grad_v, l, d)
    return launch.pool_backward(grad_k, grad_v, seq_len, dtype, cfg)


@pool_backward.register_fake
def _(
    grad_k: Tensor, grad_v: Tensor, seq_len: int, dtype: torch.dtype, l: int, d: int  # noqa: E741
) -> tuple[Tensor, Tensor]:  # fmt: skip
    batch, _, groups, d_k = grad_k.shape
    dk = grad_k.new_empty(batch, seq_len, groups, d_k, dtype=dtype)
    return dk, grad_v.new_empty(batch, seq_len, groups, grad_v.shape[-1], dtype=dtype)


def _keep_pool(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    k, _, *numbers = inputs
    ctx.numbers = k.shape[1], k.dtype, *numbers


def _pool_gradients(ctx: Any, grad_k: Tensor, grad_v: Tensor) -> tuple[Tensor | None, ...]:
    return (*pool_backward(grad_k, grad_v, *ctx.numbers), None, None)


pool.register_autograd(_pool_gradients, setup_context=_keep_pool)


def pool_by_triton(k: Tensor, v: Tensor, cfg: NSAConfig) -> tuple[Tensor, Tensor]:
    """`compression.mean_pool` of keys and of values [B,S,G,D], together."""
    pooled: tuple[Tensor, Tensor] = pool(k, v, cfg.l, cfg.d)
    return pooled


@torch.library.custom_op(f"nsa::{MIX_OPERATOR}", mutates_args=())
def mix(cmp: Tensor, sel: Tensor, win: Tensor, gates: Tensor) -> Tensor:
    """Sum of the branches [B,S,H,Dv], each times its gate [B,S,H,3], in the type of the gates."""
    from nsa.attention.triton.between import launch

    return launch.mix_forward(cmp, sel, win, gates)


@mix.register_fake
def _(cmp: Tensor, sel: Tensor, win: Tensor, gates: Tensor) -> Tensor:
    return gates.new_empty(cmp.shape)


@torch.library.custom_op("nsa::mix_backward", mutates_args=())
def mix_backward(
    grad: Tensor, cmp: Tensor, sel: Tensor, win: Tensor, gates: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the three branches and of the gates from that of the output."""
    from nsa.attention.triton.between import launch

    return launch.mix_backward(grad, cmp, sel, win, gates)


@mix_backward.register_fake
def _(
    grad: Tensor, cmp: Tensor, sel: Tensor, win: Tensor, gates: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_cmp, d_sel, d_win, d_gates = (x.new_empty(x.shape) for x in (cmp, sel, win, gates))
    return d_cmp, d_sel, d_win, d_gates


def _keep_mix(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _mix_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = mix_backward(grad, *ctx.saved_tensors)
    return found


mix.register_autograd(_mix_gradients, setup_context=_keep_mix)


def mix_by_triton(cmp: Tensor, sel: Tensor, win: Tensor, gates: Tensor) -> Tensor:
    """Gated sum [B,S,H,Dv] of branches [B,S,G,h,Dv], by gates [B,S,H,3]."""
    out: Tensor = mix(*(x.flatten(2, 3) for x in (cmp, sel, win)), gates)
    return out
