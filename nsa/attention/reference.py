"""The equations without tricks: the oracle with every mask written out, and token by token.

The oracle takes O(S^2) memory, every branch one softmax. Sequential prefill takes one query after
the other, against everything before it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.attention.branches import Branches
from nsa.attention.selection import (
    accumulate_dtype,
    block_map,
    build_ranges,
    compress,
    compressed_probabilities,
    group_queries,
    pick_blocks,
    range_tokens,
)
from nsa.attention.selection import n_visible as count_visible
from nsa.config import NSAConfig, Ranges


def _masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, cfg: NSAConfig) -> Tensor:
    """Attention of q [B,G,S,h,Dk] on the keys that mask [B,G,S,S] allows; [B,G,S,h,Dv]."""
    logits = torch.einsum("bgshd,bgtd->bgsht", q, k) * cfg.d_k**-0.5
    logits = logits.masked_fill(~mask[:, :, :, None, :], float("-inf"))
    return torch.einsum("bgsht,bgtd->bgshd", logits.softmax(-1), v)


def _mixed(gates: Tensor, o_cmp: Tensor, o_sel: Tensor, o_win: Tensor) -> Tensor:
    """Equation 5: the sum [B,S,H,Dv] of branches [B,G,S,h,Dv], by gates [B,G,S,h,3]."""
    out = gates[..., 0:1] * o_cmp + gates[..., 1:2] * o_sel + gates[..., 2:3] * o_win
    return out.transpose(1, 2).flatten(2, 3)


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

    return _mixed(group_queries(wide.gates, cfg), o_cmp, o_sel, o_win).to(dtype), blocks


def attend_selected(
    q: Tensor, k: Tensor, v: Tensor, ranges: Tensor, width: int, cfg: NSAConfig
) -> Tensor:
    """Attention of q [B,G,1,h,Dk] on the tokens of ranges [B,1,G,n,2] in k, v [B,T,G,D]."""
    index, valid = range_tokens(ranges[:, 0], width)
    # [B,T,G,D] gathered along T with an index per batch element and group.
    index = index.transpose(1, 2)[..., None]
    keys = k.gather(1, index.expand(-1, -1, -1, k.shape[-1])).transpose(1, 2)
    values = v.gather(1, index.expand(-1, -1, -1, v.shape[-1])).transpose(1, 2)
    logits = torch.einsum("bgchd,bgtd->bgcht", q, keys) * cfg.d_k**-0.5
    logits = logits.masked_fill(~valid[:, :, None, None, :], float("-inf"))
    return torch.einsum("bgcht,bgtd->bgchd", logits.softmax(-1), values)


def attend_token(x: Branches, t: int, cfg: NSAConfig, version: Ranges) -> tuple[Tensor, Tensor]:
    """Output [B,1,H,Dv] and selected blocks [B,1,G,n_sel] of the query at position t.

    x.q and x.gates hold that one token; k_cmp, v_cmp are compressed [B,N,G,D] and may reach
    beyond t (what t cannot see is cut off); k_sel, v_sel start at token 0; k_win, v_win are the
    last min(w, t + 1) tokens. All in the accumulation type.
    """
    q = group_queries(x.q, cfg)
    position = torch.tensor([t], device=q.device)
    seen = int(count_visible(torch.tensor(t), x.k_cmp.shape[1], cfg))
    k_cmp, v_cmp = x.k_cmp[:, :seen].transpose(1, 2), x.v_cmp[:, :seen].transpose(1, 2)
    p_cmp = compressed_probabilities(q, k_cmp, position, cfg)
    o_cmp = torch.einsum("bgchn,bgnd->bgchd", p_cmp, v_cmp)

    blocks = pick_blocks(p_cmp, position, cfg.n_blocks(t + 1), cfg).transpose(1, 2)
    ranges = build_ranges(blocks, cfg, version, position)
    width = min(cfg.n_sel * cfg.l_sel, t + 1)
    o_sel = attend_selected(q, x.k_sel, x.v_sel, ranges, width, cfg)

    logits = torch.einsum("bgchd,btgd->bgcht", q, x.k_win) * cfg.d_k**-0.5
    o_win = torch.einsum("bgcht,btgd->bgchd", logits.softmax(-1), x.v_win)

    return _mixed(group_queries(x.gates, cfg), o_cmp, o_sel, o_win), blocks


def sequential(x: Branches, cfg: NSAConfig, version: Ranges) -> tuple[Tensor, Tensor]:
    """Token by token: output [B,S,H,Dv] and the selected blocks [B,S,G,n_sel]."""
    dtype = x.q.dtype
    wide = x.to(accumulate_dtype(dtype))
    k_cmp, v_cmp = compress(wide.k_cmp, cfg), compress(wide.v_cmp, cfg)
    outputs, picked = [], []
    for t in range(x.q.shape[1]):
        near = slice(max(0, t + 1 - cfg.w), t + 1)
        at, past = slice(t, t + 1), slice(0, t + 1)
        now = Branches(
            q=wide.q[:, at],
            k_cmp=k_cmp,
            v_cmp=v_cmp,
            k_sel=wide.k_sel[:, past],
            v_sel=wide.v_sel[:, past],
            k_win=wide.k_win[:, near],
            v_win=wide.v_win[:, near],
            gates=wide.gates[:, at],
        )
        out, blocks = attend_token(now, t, cfg, version)
        outputs.append(out)
        picked.append(blocks)
    return torch.cat(outputs, 1).to(dtype), torch.cat(picked, 1)
