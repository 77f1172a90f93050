"""Batched prefill on any device: masked scaled_dot_product_attention by chunks of queries.

The compressed branch is an explicit softmax, because its probabilities choose the blocks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nsa.attention.branches import Branches
from nsa.attention.compression import compress, compressed_probabilities
from nsa.attention.selection import block_map, build_ranges, group_queries, pick_blocks
from nsa.attention.tracing import profile_range
from nsa.config import NSAConfig, Ranges
from nsa.contract import ATTEND_RANGE, CMP_RANGE, GATE_RANGE, SCORES_RANGE, WIN_RANGE

CHUNK = 256
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Tensor]


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """SDPA of q [B,H,C,Dk]; without a mask it is causal from position 0."""
    return scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale
    )


def _explicit(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """The same by hand, for when fused kernels are switched off."""
    if mask is None:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    logits = (q @ k.transpose(-1, -2)).float() if q.dtype.itemsize < 4 else q @ k.transpose(-1, -2)
    logits = (logits * scale).masked_fill(~mask, float("-inf"))
    return logits.softmax(-1).to(v.dtype) @ v


def _expand(x: Tensor, cfg: NSAConfig) -> Tensor:
    """Keys or values [B,T,G,D] as [B,H,T,D], a group's heads sharing memory until they must not."""
    wide = x.transpose(1, 2)[:, :, None].expand(-1, -1, cfg.heads_per_group, -1, -1)
    return wide.flatten(1, 2)


def _compressed(x: Branches, cfg: NSAConfig) -> tuple[Tensor, Tensor]:
    """Compressed branch [B,S,H,Dv] in the accumulation type, and blocks [B,S,G,n_sel]."""
    seq_len = x.q.shape[1]
    k, v = compress(x.k_cmp, cfg).transpose(1, 2), compress(x.v_cmp, cfg).transpose(1, 2)
    q = group_queries(x.q, cfg).to(k.dtype)
    outputs, picked = [], []
    for start in range(0, seq_len, CHUNK):
        stop = min(start + CHUNK, seq_len)
        positions = torch.arange(start, stop, device=q.device)
        with profile_range(CMP_RANGE):
            p = compressed_probabilities(q[:, :, start:stop], k, positions, cfg)
            outputs.append(torch.einsum("bgchn,bgnd->bgchd", p, v))
        with profile_range(SCORES_RANGE):
            picked.append(pick_blocks(p, positions, cfg.n_blocks(seq_len), cfg))
    out = torch.cat(outputs, 2).transpose(1, 2).flatten(2, 3)
    return out, torch.cat(picked, 2).transpose(1, 2).contiguous()


def _selected(
    x: Branches, blocks: Tensor, cfg: NSAConfig, version: Ranges, attend: Attend
) -> Tensor:
    """Selected branch [B,H,S,Dv]."""
    seq_len, scale = x.q.shape[1], cfg.d_k**-0.5
    n_blocks = cfg.n_blocks(seq_len)
    chosen = block_map(build_ranges(blocks, cfg, version), n_blocks, cfg).transpose(1, 2)
    q, k, v = x.q.transpose(1, 2), _expand(x.k_sel, cfg), _expand(x.v_sel, cfg)
    place = torch.arange(seq_len, device=q.device)
    # Early queries see no more than n_sel blocks, so they select everything visible.
    full = min(seq_len, cfg.n_sel * cfg.l_sel)
    with profile_range(ATTEND_RANGE):
        parts = [attend(q[:, :, :full], k[:, :, :full], v[:, :, :full], None, scale)]
        for start in range(full, seq_len, CHUNK):
            stop = min(start + CHUNK, seq_len)
            mask = chosen[:, :, start:stop].repeat_interleave(cfg.l_sel, -1)[..., :stop]
            mask = mask & (place[:stop] <= place[start:stop, None])
            mask = mask.repeat_interleave(cfg.heads_per_group, 1)
            parts.append(attend(q[:, :, start:stop], k[:, :, :stop], v[:, :, :stop], mask, scale))
    return torch.cat(parts, 2)


def _window(x: Branches, cfg: NSAConfig, attend: Attend) -> Tensor:
    """Sliding-window branch [B,H,S,Dv]: the last w tokens, the current one included."""
    seq_len, scale = x.q.shape[1], cfg.d_k**-0.5
    q, k, v = x.q.transpose(1, 2), _expand(x.k_win, cfg), _expand(x.v_win, cfg)
    place = torch.arange(seq_len, device=q.device)
    full = min(seq_len, cfg.w)
    with profile_range(WIN_RANGE):
        parts = [attend(q[:, :, :full], k[:, :, :full], v[:, :, :full], None, scale)]
        for start in range(full, seq_len, CHUNK):
            stop = min(start + CHUNK, seq_len)
            first = max(0, start + 1 - cfg.w)
            query, key = place[start:stop, None], place[first:stop]
            mask = (key <= query) & (key > query - cfg.w)
            keys, values = k[:, :, first:stop], v[:, :, first:stop]
            parts.append(attend(q[:, :, start:stop], keys, values, mask, scale))
    return torch.cat(parts, 2)


def batched_sdpa(
    x: Branches, cfg: NSAConfig, version: Ranges, *, use_flash: bool
) -> tuple[Tensor, Tensor]:
    """Output [B,S,H,Dv] and the selected blocks [B,S,G,n_sel], a chunk of queries at a time."""
    attend = _fused if use_flash else _explicit
    o_cmp, blocks = _compressed(x, cfg)
    o_sel = _selected(x, blocks, cfg, version, attend).transpose(1, 2)
    o_win = _window(x, cfg, attend).transpose(1, 2)
    with profile_range(GATE_RANGE):
        gates = x.gates.to(o_cmp.dtype)
        out = gates[..., 0:1] * o_cmp + gates[..., 1:2] * o_sel + gates[..., 2:3] * o_win
    return out.to(x.q.dtype), blocks
