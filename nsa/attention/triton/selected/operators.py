"""The selected branch as operators of torch: known to autograd, to torch.compile and to profilers.

`nsa::merged_ranges`, `nsa::selected_bits`, `nsa::selected` and `nsa::selected_backward`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.attention.triton.registered import config_of, differentiate
from nsa.config import NSAConfig

# What they are to profilers and dispatch modes.
RANGES_OPERATOR, SELECTED_OPERATOR = "merged_ranges", "selected"


def _config(q: Tensor, v: Tensor, l_sel: int, n_sel: int) -> NSAConfig:
    return config_of(q, v.shape[-1], l=l_sel, d=l_sel, l_sel=l_sel, n_sel=n_sel)


@torch.library.custom_op(f"nsa::{RANGES_OPERATOR}", mutates_args=())
def merged_ranges(blocks: Tensor, l_sel: int) -> Tensor:
    """Merged token ranges [B,S,G,n,2] of blocks [B,S,G,n] that ascend, -1 at the end for none."""
    from nsa.attention.triton.selected import launch

    return launch.ranges_of(blocks, l_sel)


@merged_ranges.register_fake
def _(blocks: Tensor, l_sel: int) -> Tensor:
    return blocks.new_empty(*blocks.shape, 2)


@torch.library.custom_op("nsa::selected_bits", mutates_args=())
def selected_bits(ranges: Tensor, l_sel: int) -> Tensor:
    """Blocks that token ranges [B,S,G,n,2] cover, as bits int32 [B*G, words, S]."""
    from nsa.attention.triton.selected import launch

    groups, n = ranges.shape[2:4]
    cfg = NSAConfig(dim=1, n_heads=groups, n_kv_groups=groups, l=l_sel, d=l_sel, l_sel=l_sel,
                    n_sel=max(n, 3))  # fmt: skip
    return launch.bits_of(ranges, cfg)


@selected_bits.register_fake
def _(ranges: Tensor, l_sel: int) -> Tensor:
    batch, seq_len, groups = ranges.shape[:3]
    words = ((seq_len + l_sel - 1) // l_sel + 31) // 32
    return ranges.new_empty(batch * groups, words, seq_len, dtype=torch.int32)


@torch.library.custom_op(f"nsa::{SELECTED_OPERATOR}", mutates_args=())
def selected(
    q: Tensor, k: Tensor, v: Tensor, bits: Tensor, l_sel: int, n_sel: int
) -> tuple[Tensor, Tensor]:
    """Output [B,S,G,h,Dv] and log-sum-exp to the base 2 [B*G, S*h] of q [B,S,G,h,Dk]."""
    from nsa.attention.triton.selected import launch

    return launch.forward(q, k, v, bits, _config(q, v, l_sel, n_sel))


@selected.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, bits: Tensor, l_sel: int, n_sel: int
) -> tuple[Tensor, Tensor]:
    batch, seq_len, groups, heads = q.shape[:4]
    out = q.new_empty(batch, seq_len, groups, heads, v.shape[-1])
    return out, q.new_empty(batch * groups, seq_len * heads, dtype=torch.float32)


@torch.library.custom_op("nsa::selected_backward", mutates_args=())
def selected_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bits: Tensor, out: Tensor, lse: Tensor,
    l_sel: int, n_sel: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v from that of the output."""
    from nsa.attention.triton.selected import launch

    return launch.backward(grad, q, k, v, bits, out, lse, _config(q, v, l_sel, n_sel))


@selected_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bits: Tensor, out: Tensor, lse: Tensor,
    l_sel: int, n_sel: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


differentiate(selected, selected_backward)


def ranges_by_triton(blocks: Tensor, cfg: NSAConfig) -> Tensor:
    """`selection.ranges_v2` of what `blocks_by_triton` chose, at positions 0..S-1."""
    ranges: Tensor = merged_ranges(blocks, cfg.l_sel)
    return ranges


def attend_selected(q: Tensor, k: Tensor, v: Tensor, ranges: Tensor, cfg: NSAConfig) -> Tensor:
    """Selected branch [B,S,G,h,Dv] of q [B,S,G,h,Dk] on k, v [B,S,G,D], by token ranges."""
    out: Tensor = selected(q, k, v, selected_bits(ranges, cfg.l_sel), cfg.l_sel, cfg.n_sel)[0]
    return out
