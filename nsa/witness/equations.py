"""Attention's equations in float64, forward and backward, and the rules by which blocks are chosen.

Written out once more from the paper: neither block ranges nor masks nor pooling are shared with the
paths. Each stretch of queries is a few dense products with autograd, so that a device takes whole
sequences. The blocks are given, not chosen here, and judged by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from nsa.attention.branches import Branches
from nsa.config import FORCED_LOCAL_BLOCKS, NSAConfig

# What float64 scores of one chunk of queries, with everything that is kept of them, may take.
_BUDGET_BYTES = 1 << 28
_SCORES_AT_ONCE = 12


def equations(
    x: Branches, grad: Tensor, blocks: Tensor, cfg: NSAConfig
) -> tuple[dict[str, Tensor], int, float]:
    """Output [1,S,H,Dv] and gradients by name, for blocks [1,S,G,n] and the output's gradient.

    And how many queries chose illegally, and the most by which a block that was left out scores
    above one that was taken, as a share of its score.
    """
    leaves = {n: v.detach().double().requires_grad_() for n, v in x.named().items()}
    seq_len, share = grad.shape[1], cfg.heads_per_group
    out = torch.zeros_like(grad, dtype=torch.float64)
    illegal, shortfall = 0, 0.0
    for group in range(cfg.n_kv_groups):
        heads = slice(group * share, (group + 1) * share)
        for start, stop in _pieces(seq_len, share):
            taken = blocks[0, start:stop, group]
            at = torch.arange(start, stop, device=taken.device)
            with torch.enable_grad():
                rows = {"q": leaves["q"][0, start:stop, heads].transpose(0, 1)}
                rows["gates"] = leaves["gates"][0, start:stop, heads].transpose(0, 1)
                # Later keys are nobody's here; of compressed ones there are few.
                keys = {n: v[0, :, group] for n, v in leaves.items() if n[0] in "kv"}
                keys |= {n: v[:stop] for n, v in keys.items() if "cmp" not in n}
                part, p = _attend(rows, keys, _as_mask(taken, cfg.n_blocks(seq_len)), at, cfg)
                part.backward(grad[0, start:stop, heads].double().transpose(0, 1))  # type: ignore[no-untyped-call]
            out[0, start:stop, heads] = part.detach().transpose(0, 1)
            scores = p.detach().sum(0) @ _overlap(p.shape[-1], cfg.n_blocks(seq_len), cfg, p.device)
            wrong, left, gap = judge(taken, scores, at, cfg)
            illegal += wrong
            shortfall = max(shortfall, float((gap / left.clamp_min(1e-300)).max()))
    grads = {n: v.grad if v.grad is not None else torch.zeros_like(v) for n, v in leaves.items()}
    return {"out": out, **grads}, illegal, shortfall


def _pieces(seq_len: int, heads: int) -> Iterator[tuple[int, int]]:
    """Stretches of queries whose scores over all keys fit the budget."""
    size = max(1, _BUDGET_BYTES // (_SCORES_AT_ONCE * heads * seq_len * 8))
    return ((at, min(at + size, seq_len)) for at in range(0, seq_len, size))


def _as_mask(blocks: Tensor, count: int) -> Tensor:
    """Blocks [...,n], -1 for none, as yes or no for each of so many [...,NB]; others are no."""
    places = blocks.where((blocks >= 0) & (blocks < count), count)
    found = torch.zeros(*blocks.shape[:-1], count + 1, dtype=torch.bool, device=blocks.device)
    return found.scatter_(-1, places, True)[..., :count]


def _softmax(q: Tensor, k: Tensor, seen: Tensor, cfg: NSAConfig) -> Tensor:
    """Probabilities [h,C,T] over what is seen [C,T]; zeros where that is nothing."""
    logits = (q @ k.T * cfg.d_k**-0.5).masked_fill(~seen, -1e30)
    p: Tensor = logits.softmax(-1) * seen
    return p


def _attend(
    rows: dict[str, Tensor], keys: dict[str, Tensor], chosen: Tensor, at: Tensor, cfg: NSAConfig
) -> tuple[Tensor, Tensor]:
    """Equation 5 for queries at [C]: output [h,C,Dv], and the compressed probabilities."""
    q, gates, at = rows["q"], rows["gates"], at[:, None]
    token = torch.arange(keys["k_sel"].shape[0], device=at.device)
    k, v = keys["k_cmp"], keys["v_cmp"]
    if cfg.phi == "avg":
        k, v = (_pooled(t, cfg) for t in (k, v))
    last = torch.arange(k.shape[0], device=at.device) * cfg.d + cfg.l - 1
    p = _softmax(q, k, last <= at, cfg)
    causal = token <= at
    selected = _softmax(q, keys["k_sel"], chosen[:, token // cfg.l_sel] & causal, cfg)
    near = _softmax(q, keys["k_win"], (at - token < cfg.w) & causal, cfg)
    branches = (p @ v, selected @ keys["v_sel"], near @ keys["v_win"])
    parts = [branch * gates[..., n : n + 1] for n, branch in enumerate(branches)]
    return parts[0] + parts[1] + parts[2], p


def _pooled(x: Tensor, cfg: NSAConfig) -> Tensor:
    """Mean of each compression block: x [S,D] to [N,D]."""
    return x.unfold(0, cfg.l, cfg.d).mean(-1) if x.shape[0] >= cfg.l else x[:0]


def _overlap(n: int, count: int, cfg: NSAConfig, device: torch.device) -> Tensor:
    """Tokens that a compression and a selection block share [N,NB], in units of d (equation 9)."""
    first = torch.arange(n, device=device)[:, None] * cfg.d
    block = torch.arange(count, device=device) * cfg.l_sel
    shared = torch.minimum(first + cfg.l, block + cfg.l_sel) - torch.maximum(first, block)
    return shared.clamp_min(0).double() / cfg.d


def judge(blocks: Tensor, scores: Tensor, at: Tensor, cfg: NSAConfig) -> tuple[int, Tensor, Tensor]:
    """Another's blocks [...,n] (-1 for none) of queries `at`, by the equations' scores [...,NB].

    How many take an invisible block, one twice, too few, too many, or not the forced ones. Then of
    each the best score that was left out, and by how much it is above the worst that was taken: not
    above 0 where all take the best ones, minus infinity where there was no choice.
    """
    chosen = _as_mask(blocks, scores.shape[-1])
    block = torch.arange(scores.shape[-1], device=scores.device)
    current = (at // cfg.l_sel)[..., None]
    visible = block <= current
    forced = visible & ((block == 0) | (current - block < FORCED_LOCAL_BLOCKS))
    wanted = visible.sum(-1).clamp_max(cfg.n_sel)
    right = (chosen.sum(-1) == wanted) & ((blocks >= 0).sum(-1) == wanted)
    right &= ~(chosen & ~visible).any(-1) & ~(forced & ~chosen).any(-1)
    left = scores.masked_fill(~visible | chosen, -torch.inf).amax(-1)
    taken = scores.masked_fill(~chosen | forced, torch.inf).amin(-1)
    return int((~right).sum()), left, left - taken
