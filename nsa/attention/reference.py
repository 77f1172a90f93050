"""The oracle: every mask written out in full, every branch one softmax. O(S^2) memory."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.attention.branches import Branches
from nsa.attention.compression import accumulate_dtype, compress, compressed_probabilities
from nsa.attention.selection import block_map, build_ranges, group_queries, pick_blocks
from nsa.config import NSAConfig, Ranges


def _masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, cfg: NSAConfig) -> Tensor:
    """Attention of q [B,G,S,h,Dk] on the keys that mask [B,G,S,S] allows; [B,G,S,h,Dv]."""
    logits = torch.einsum("bgshd,bgtd->bgsht", q, k) * cfg.d_k**-0.5
    logits = logits.masked_fill(~mask[:, :, :, None, :], float("-inf"))
    return torch.einsum("bgsht,bgtd->bgshd", logits.softmax(-1), v)


def reference(x: Branches, cfg: NSAConfig, version: Ranges) -> tuple[Tensor, Tensor]:
    """NSA written out: output [B,S,H,Dv] and the selected blocks [B,S,G,n_sel].

    Half types are computed in float32 throughout and rounded once, at the end.
    """
    seq_len, dtype = x.q.shape[1], x.q.dtype
    wide = x.to(accumulate_dtype(dtype))
    q = group_queries(wide.q, cfg)
    positions = torch.arange(seq_len, device=q.device)

    k_cmp = compress(wide.k_cmp, cfg).transpose(1, 2)
    v_cmp = compress(wide.v_cmp, cfg).transpose(1, 2)
    p_cmp = compressed_probabilities(q, k_cmp, positions, cfg)
    o_cmp = torch.einsum("bgshn,bgnd->bgshd", p_cmp, v_cmp)

    n_blocks = cfg.n_blocks(seq_len)
    blocks = pick_blocks(p_cmp, positions, n_blocks, cfg).transpose(1, 2)
    causal = positions <= positions[:, None]
    chosen = block_map(build_ranges(blocks, cfg, version), n_blocks, cfg).transpose(1, 2)
    tokens = chosen.repeat_interleave(cfg.l_sel, -1)[..., :seq_len]
    k_sel, v_sel = wide.k_sel.transpose(1, 2), wide.v_sel.transpose(1, 2)
    o_sel = _masked_attention(q, k_sel, v_sel, tokens & causal, cfg)

    near = (causal & (positions > positions[:, None] - cfg.w)).expand(tokens.shape)
    o_win = _masked_attention(q, wide.k_win.transpose(1, 2), wide.v_win.transpose(1, 2), near, cfg)

    gates = group_queries(wide.gates, cfg)
    out = gates[..., 0:1] * o_cmp + gates[..., 1:2] * o_sel + gates[..., 2:3] * o_win
    return out.transpose(1, 2).flatten(2, 3).to(dtype), blocks
