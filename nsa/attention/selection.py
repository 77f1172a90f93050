"""Choosing the blocks that a kv group's heads attend to (equations 10 and 11)."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.attention.compression import block_scores, compressed_probabilities
from nsa.attention.shapes import split_dim
from nsa.config import FORCED_LOCAL_BLOCKS, NSAConfig


def group_queries(q: Tensor, cfg: NSAConfig) -> Tensor:
    """View q [B,S,H,D] as [B,G,S,h,D]: the h query heads of a group side by side."""
    return split_dim(q, 2, cfg.heads_per_group).transpose(1, 2)


def top_blocks(scores: Tensor, positions: Tensor, cfg: NSAConfig) -> Tensor:
    """Pick n_sel blocks per query: scores [..., C, NB] at `positions` [C] to [..., C, n_sel].

    Block j is visible to t iff j*l_sel <= t. Block 0, the current block and the one before it
    are always taken, inside n_sel; the rest by descending score, ties to the lower index (a
    stable sort). Indices ascend; missing ones are -1, at the end.
    """
    n_blocks = scores.shape[-1]
    block = torch.arange(n_blocks, device=scores.device)
    current = torch.div(positions, cfg.l_sel, rounding_mode="floor")[:, None]
    forced = (block == 0) | ((block <= current) & (block > current - FORCED_LOCAL_BLOCKS))
    scores = scores.masked_fill(forced, float("inf"))
    scores = scores.masked_fill(block > current, float("-inf"))
    taken = min(cfg.n_sel, n_blocks)
    order = scores.sort(dim=-1, descending=True, stable=True).indices[..., :taken]
    # Invisible blocks can only fill places that visible ones left free; they become padding.
    order = order.masked_fill(order > current, n_blocks).sort(-1).values
    order = order.masked_fill(order == n_blocks, -1)
    return torch.nn.functional.pad(order, (0, cfg.n_sel - taken), value=-1)


@torch.no_grad()
def pick_blocks(p: Tensor, positions: Tensor, n_blocks: int, cfg: NSAConfig) -> Tensor:
    """Selected blocks [B,G,C,n_sel] from the probabilities p [B,G,C,h,N] of `positions` [C].

    Equation 10: the importance of a block is summed over the query heads of its group, so that
    all of them read the same blocks.
    """
    return top_blocks(block_scores(p.sum(3), n_blocks, cfg), positions, cfg)


@torch.no_grad()
def selected_blocks(q: Tensor, k: Tensor, cfg: NSAConfig, *, chunk: int = 256) -> Tensor:
    """Selected blocks [B,G,S,n_sel] for q [B,G,S,h,Dk] and compressed keys k [B,G,N,Dk].

    Works through `chunk` queries at a time, so that S x N probabilities never exist at once.
    """
    seq_len = q.shape[2]
    picked = []
    for start in range(0, seq_len, chunk):
        stop = min(start + chunk, seq_len)
        positions = torch.arange(start, stop, device=q.device)
        p = compressed_probabilities(q[:, :, start:stop], k, positions, cfg)
        picked.append(pick_blocks(p, positions, cfg.n_blocks(seq_len), cfg))
    return torch.cat(picked, 2)
