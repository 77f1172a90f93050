"""The compressed branch and the choice of blocks as operators of torch, as in `operators`.

`nsa::compressed`, `nsa::compressed_backward` and `nsa::top_blocks`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa.config import MIN_N_SEL, NSAConfig


def _config(
    q: Tensor, d_v: int, l: int, d: int, l_sel: int | None = None, n_sel: int = MIN_N_SEL  # noqa: E741
) -> NSAConfig:  # fmt: skip
    """What the kernels read of a config, with the numbers of these tensors."""
    groups, heads, d_k = q.shape[2:]
    return NSAConfig(
        dim=1, n_heads=groups * heads, n_kv_groups=groups, d_k=d_k, d_v=d_v, l=l, d=d,
        l_sel=d if l_sel is None else l_sel, n_sel=n_sel,
    )  # fmt: skip


# What they are to profilers and dispatch modes.
COMPRESSED_OPERATOR, TOP_OPERATOR = "compressed", "top_blocks"


@torch.library.custom_op(f"nsa::{COMPRESSED_OPERATOR}", mutates_args=())
def compressed(q: Tensor, k: Tensor, v: Tensor, l: int, d: int) -> tuple[Tensor, Tensor]:  # noqa: E741
    """Output float32 [B,S,G,h,Dv] and log-sum-exp to the base 2 [B*G, S*h] of q [B,S,G,h,Dk]."""
    from nsa.attention.triton import compressed_launch

    return compressed_launch.forward(q, k, v, _config(q, v.shape[-1], l, d))


@compressed.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, l: int, d: int) -> tuple[Tensor, Tensor]:  # noqa: E741
    batch, seq_len, groups, heads = q.shape[:4]
    out = k.new_empty(batch, seq_len, groups, heads, v.shape[-1])
    return out, k.new_empty(batch * groups, seq_len * heads)


@torch.library.custom_op("nsa::compressed_backward", mutates_args=())
def compressed_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, l: int, d: int  # noqa: E741
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v from that of the output."""
    from nsa.attention.triton import compressed_launch

    return compressed_launch.backward(grad, q, k, v, out, lse, _config(q, v.shape[-1], l, d))


@compressed_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, l: int, d: int  # noqa: E741
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@torch.library.custom_op(f"nsa::{TOP_OPERATOR}", mutates_args=())
def top_blocks(
    q: Tensor, k: Tensor, lse: Tensor, l: int, d: int, l_sel: int, n_sel: int  # noqa: E741
) -> Tensor:  # fmt: skip
    """Blocks int64 [B,S,G,n_sel] that q [B,S,G,h,Dk] selects by compressed keys k [B,N,G,Dk]."""
    from nsa.attention.triton import compressed_launch

    return compressed_launch.top_blocks(q, k, lse, _config(q, k.shape[-1], l, d, l_sel, n_sel))


@top_blocks.register_fake
def _(
    q: Tensor, k: Tensor, lse: Tensor, l: int, d: int, l_sel: int, n_sel: int  # noqa: E741
) -> Tensor:  # fmt: skip
    return q.new_empty(*q.shape[:3], n_sel, dtype=torch.int64)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, l, d = inputs  # noqa: E741
    ctx.save_for_backward(*tensors, *output)
    ctx.numbers = (l, d)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 5
    return (*compressed_backward(grad, *ctx.saved_tensors, *ctx.numbers), None, None)


compressed.register_autograd(_backward, setup_context=_keep)


def attend_compressed_by_triton(
    q: Tensor, k: Tensor, v: Tensor, cfg: NSAConfig
) -> tuple[Tensor, Tensor]:
    """Output float32 [B,S,G,h,Dv] and log-sum-exp of q [B,S,G,h,Dk] on float32 k, v [B,N,G,D]."""
    out, lse = compressed(q, k, v, cfg.l, cfg.d)
    return out, lse


def blocks_by_triton(q: Tensor, k: Tensor, lse: Tensor, cfg: NSAConfig) -> Tensor:
    """Blocks int64 [B,S,G,n_sel], ascending, -1 at the end; no gradient flows through a choice."""
    blocks: Tensor = top_blocks(
        q.detach(), k.detach(), lse.detach(), cfg.l, cfg.d, cfg.l_sel, cfg.n_sel
    )
    return blocks
