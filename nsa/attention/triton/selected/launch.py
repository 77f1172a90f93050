"""Starts the selected branch's kernels; never asks the device for a number."""

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
from nsa.attention.triton.selected.blocks import (
    delta_kernel,
    gradient_merge_kernel,
    gradient_part_kernel,
    merge_kernel,
    part_kernel,
)
from nsa.attention.triton.selected.columns import piece_kernel, sum_kernel
from nsa.attention.triton.selected.index import pack_kernel
from nsa.attention.triton.selected.lists import Lists, lists_of
from nsa.attention.triton.selected.ranges import ranges_kernel
from nsa.attention.triton.selected.rows import forward_kernel, query_gradient_kernel
from nsa.attention.triton.selected.tiles import ByBlock, Cut, choose_cut
from nsa.attention.triton.tiles import LEAST, padded
from nsa.attention.triton.tuned import tuned
from nsa.config import NSAConfig

TOKENS = 32


def ranges_of(blocks: Tensor, l_sel: int) -> Tensor:
    """Merged token ranges int64 [B,S,G,n,2] of blocks [B,S,G,n] that ascend, -1 at the end."""
    batch, seq_len, groups, n = blocks.shape
    blocks = blocks.contiguous()
    ranges = torch.empty(*blocks.shape, 2, dtype=torch.int64, device=blocks.device)
    with device_of(blocks):
        ranges_kernel[triton.cdiv(seq_len * groups, TOKENS), batch](
            blocks, ranges, seq_len * groups, groups, L_SEL=l_sel, N_SEL=n,
            PLACES=triton.next_power_of_2(n), ROWS=TOKENS,
        )  # fmt: skip
    return ranges


def bits_of(ranges: Tensor, l_sel: int) -> Tensor:
    """Blocks that token ranges [B,S,G,n,2] cover, as bits int32 [B*G, words, S]."""
    batch, seq_len, groups, n = ranges.shape[:4]
    ranges = ranges.contiguous()
    words = triton.cdiv(triton.cdiv(seq_len, l_sel), 32)
    bits = torch.empty(batch * groups, words, seq_len, dtype=torch.int32, device=ranges.device)
    with device_of(ranges):
        pack_kernel[triton.cdiv(seq_len, TOKENS), batch * groups, words](
            ranges, bits, seq_len, groups, words, L_SEL=l_sel, N_SEL=n,
            PLACES=triton.next_power_of_2(n), TOKENS=TOKENS,
        )  # fmt: skip
    return bits


def forward(q: Tensor, k: Tensor, v: Tensor, bits: Tensor, cfg: NSAConfig) -> tuple[Tensor, Tensor]:
    """Output [B,S,G,h,Dv] and log-sum-exp to the base 2 [B*G, S*h] of q [B,S,G,h,Dk]."""
    batch, seq_len, groups, heads = q.shape[:4]
    q, k, v = (inner(x) for x in (q, k, v))
    out, lse = results_of(q, cfg, q.dtype)
    cut = tuned("selected", choose_cut(cfg, seq_len, batch * groups), cfg, q)
    with device_of(q):
        if cut.by_block:
            _forward_by_block(q, k, v, lists_of(bits, cfg, cut), out, lse, cfg, cut.by_block)
            return out, lse
        forward_kernel[triton.cdiv(seq_len * heads, cut.forward.rows), batch * groups](
            q, k, v, bits, out, lse, seq_len, groups, bits.shape[1], scale_of(cfg),
            *strides_of(q, k, v), **shape_constants(cfg), EVERY=cut.every, **how(cut.forward),
        )  # fmt: skip
    return out, lse


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bits: Tensor, out: Tensor, lse: Tensor,
    cfg: NSAConfig,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q [B,S,G,h,Dk], k [B,S,G,Dk] and v [B,S,G,Dv]; equal bits for equal inputs."""
    batch, seq_len, groups, heads = q.shape[:4]
    pairs, n_blocks = batch * groups, cfg.n_blocks(seq_len)
    q, k, v = (inner(x) for x in (q, k, v))
    grad, out = grad.contiguous(), out.contiguous()
    cut = tuned("selected", choose_cut(cfg, seq_len, pairs), cfg, q)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    delta = torch.empty_like(lse)
    strides, shape, scale = strides_of(q, k, v), shape_constants(cfg), scale_of(cfg)
    with device_of(q):
        lists = lists_of(bits, cfg, cut)
        if cut.by_block:
            _query_gradient_by_block(
                q, k, v, lists, out, lse, grad, dq, delta, cfg, cut.by_block
            )  # fmt: skip
        else:
            rows = triton.cdiv(seq_len * heads, cut.query_gradient.rows)
            query_gradient_kernel[rows, pairs](
                q, k, v, bits, out, lse, grad, dq, delta, seq_len, groups, bits.shape[1], scale,
                cfg.d_k**-0.5, *strides, **shape, EVERY=cut.every, **how(cut.query_gradient),
            )  # fmt: skip
        # Only now: the parts of dq are gone. Padded to tiles, not to what is inside: that much is
        # written.
        parts_shape = (pairs, cut.n_pieces, padded(cfg.l_sel), padded(cfg.d_k) + padded(cfg.d_v))
        parts = torch.empty(parts_shape, dtype=torch.float32, device=q.device)
        piece_kernel[cut.n_pieces, pairs](
            q, k, v, grad, lse, delta, lists.readers, lists.counts, lists.offsets, lists.ends,
            parts, seq_len, groups, n_blocks, cut.n_pieces, lists.length, scale, *strides, **shape,
            **piece_constants(cfg, seq_len, cut), **how(cut.key_gradient),
        )  # fmt: skip
        sum_kernel[n_blocks, pairs, padded(cfg.l_sel) // LEAST](
            parts, lists.ends, dk, dv, seq_len, groups, n_blocks, cut.n_pieces, cfg.d_k**-0.5,
            **{name: value for name, value in shape.items() if name != "HEADS"}, FEW=LEAST,
        )  # fmt: skip
    return dq, dk, dv


def _forward_by_block(
    q: Tensor, k: Tensor, v: Tensor, lists: Lists, out: Tensor, lse: Tensor, cfg: NSAConfig,
    cut: ByBlock,
) -> None:  # fmt: skip
    """Fill output and log-sum-exp, a run of positions after the other."""
    batch, seq_len, groups, heads = q.shape[:4]
    pairs, tokens, shape = batch * groups, lists.tokens, shape_constants(cfg)
    room = (pairs * tokens * cut.places * heads,)
    parts = torch.empty((*room, cfg.d_v), dtype=q.dtype, device=q.device)
    sums = torch.empty(room, dtype=torch.float32, device=q.device)
    merged = {name: shape[name] for name in ("HEADS", "D_V", "WIDTH_V")}
    for begin, end in lists.runs():
        part_kernel[cut.n_pieces, pairs](
            q, k, v, parts, sums, lists.readers, lists.counts, lists.offsets, lists.ends, begin,
            tokens, seq_len, groups, cfg.n_blocks(seq_len), lists.length, scale_of(cfg),
            *strides_of(q, k, v), **shape, **by_block_constants(cfg, seq_len, cut),
            **how(cut.forward),
        )  # fmt: skip
        merge_kernel[triton.cdiv((end - begin) * heads, cut.merge.rows), pairs](
            parts, sums, lists.read, out, lse, begin, tokens, seq_len, groups, **merged,
            PLACES=cut.places, **how(cut.merge),
        )  # fmt: skip


def _query_gradient_by_block(
    q: Tensor, k: Tensor, v: Tensor, lists: Lists, out: Tensor, lse: Tensor, grad: Tensor,
    dq: Tensor, delta: Tensor, cfg: NSAConfig, cut: ByBlock,
) -> None:  # fmt: skip
    """Fill the gradient of the queries and delta, a run of positions after the other."""
    batch, seq_len, groups, heads = q.shape[:4]
    pairs, tokens, shape = batch * groups, lists.tokens, shape_constants(cfg)
    room = (pairs * tokens * cut.places * heads, cfg.d_k)
    parts = torch.empty(room, dtype=q.dtype, device=q.device)
    rows = {name: size for name, size in shape.items() if name not in ("L_SEL", "BLOCK")}
    merged = {name: shape[name] for name in ("HEADS", "D_K", "WIDTH_K")}
    delta_kernel[triton.cdiv(seq_len * heads, cut.merge.rows), pairs](
        q, out, lse, grad, delta, seq_len, groups, *q.stride()[:4], **rows, **how(cut.merge)
    )
    for begin, end in lists.runs():
        gradient_part_kernel[cut.n_pieces, pairs](
            q, k, v, grad, lse, delta, parts, lists.readers, lists.counts, lists.offsets,
            lists.ends, begin, tokens, seq_len, groups, cfg.n_blocks(seq_len), lists.length,
            scale_of(cfg), cfg.d_k**-0.5, *strides_of(q, k, v), **shape,
            **by_block_constants(cfg, seq_len, cut), **how(cut.query_gradient),
        )  # fmt: skip
        gradient_merge_kernel[triton.cdiv((end - begin) * heads, cut.merge.rows), pairs](
            parts, lists.read, dq, begin, tokens, seq_len, groups, **merged, PLACES=cut.places,
            **how(cut.merge),
        )  # fmt: skip


def by_block_constants(cfg: NSAConfig, seq_len: int, cut: ByBlock) -> dict[str, int]:
    """What kernels are compiled for where blocks own the work, beside the shape."""
    blocks: int = triton.next_power_of_2(cfg.n_blocks(seq_len))
    return {"PLACES": cut.places, "PIECE": cut.piece, "BLOCKS": blocks}


def piece_constants(cfg: NSAConfig, seq_len: int, cut: Cut) -> dict[str, int]:
    """The same of the gradient of keys, whose pieces are of the whole sequence."""
    blocks: int = triton.next_power_of_2(cfg.n_blocks(seq_len))
    places = cut.by_block.places if cut.by_block else 1
    return {"PLACES": places, "PIECE": cut.piece, "BLOCKS": blocks}


def shape_constants(cfg: NSAConfig) -> dict[str, int]:
    """What kernels are compiled for: the shape, and what it is padded to."""
    return head_constants(cfg) | {"L_SEL": cfg.l_sel, "BLOCK": padded(cfg.l_sel)}
