"""The compressed branch and the choice of blocks as operators of torch, as in `operators`.

`nsa::compressed`, `nsa::compressed_backward` and `nsa::top_blocks`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.attention.triton.registered import config_of, differentiate
from nsa.config import MIN_N_SEL, NSAConfig

# What they are to profilers and dispatch modes.
COMPRESSED_OPERATOR, TOP_OPERATOR = "compressed", "top_blocks"


def _config(q: Tensor, v: Tensor, l: int, d: int) -> NSAConfig:  # noqa: E741
    return config_of(q, v.shape[-1], l=l, d=d, l_sel=d, n_sel=MIN_N_SEL)


@torch.library.custom_op(f"nsa::{COMPRESSED_OPERATOR}", mutates_args=())
def compressed(
    q: Tensor, k: Tensor, v: Tensor, l: int, d: int  # noqa: E741
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Output float32 [B,S,G,h,Dv] and log-sum-exp to the base 2 [B*G, S*h] of q [B,S,G,h,Dk].

    The first log-sum-exp is for the gradients, the second, exact one for `top_blocks`.
    """
    from nsa.attention.triton.compressed import launch as compressed_launch

    return compressed_launch.forward(q, k, v, _config(q, v, l, d))


@compressed.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, l: int, d: int  # noqa: E741
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    batch, seq_len, groups, heads = q.shape[:4]
    out = k.new_empty(batch, seq_len, groups, heads, v.shape[-1])
    rows = batch * groups, seq_len * heads
    return out, k.new_empty(rows), k.new_empty(rows)


@torch.library.custom_op("nsa::compressed_backward", mutates_args=())
def compressed_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, l: int, d: int  # noqa: E741
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v from that of the output."""
    from nsa.attention.triton.compressed import launch as compressed_launch

    return compressed_launch.backward(grad, q, k, v, out, lse, _config(q, v, l, d))


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
    from nsa.attention.triton.compressed import launch as compressed_launch

    cfg = config_of(q, k.shape[-1], l=l, d=d, l_sel=l_sel, n_sel=n_sel)
    return compressed_launch.top_blocks(q, k, lse, cfg)


@top_blocks.register_fake
def _(
    q: Tensor, k: Tensor, lse: Tensor, l: int, d: int, l_sel: int, n_sel: int  # noqa: E741
) -> Tensor:  # fmt: skip
    return q.new_empty(*q.shape[:3], n_sel, dtype=torch.int64)


differentiate(compressed, compressed_backward)


def attend_compressed_by_triton(
    q: Tensor, k: Tensor, v: Tensor, cfg: NSAConfig
) -> tuple[Tensor, Tensor]:
    """Output float32 [B,S,G,h,Dv] of q [B,S,G,h,Dk] on float32 k, v [B,N,G,D]; exact lse."""
    out, _, exact_lse = compressed(q, k, v, cfg.l, cfg.d)
    return out, exact_lse


def blocks_by_triton(q: Tensor, k: Tensor, lse: Tensor, cfg: NSAConfig) -> Tensor:
    """Blocks int64 [B,S,G,n_sel], ascending, -1 at the end; no gradient flows through a choice."""
    blocks: Tensor = top_blocks(
        q.detach(), k.detach(), lse.detach(), cfg.l, cfg.d, cfg.l_sel, cfg.n_sel
    )
    return blocks
