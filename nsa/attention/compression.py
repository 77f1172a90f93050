"""The compressed branch's keys, and the importance of selection blocks (equations 7 to 9)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from nsa.attention.branches import split_dim
from nsa.config import NSAConfig


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type for scores and sums: at least float32, float64 stays float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@contextmanager
def full_float32() -> Iterator[None]:
    """No TF32 in products of float32: its 10 bits would choose other blocks than float32's 23."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def mean_pool(x: Tensor, cfg: NSAConfig) -> Tensor:
    """Mean over each compression block: x [B,S,G,D] to [B,N,G,D], in at least float32.

    Block i covers tokens [i*d, i*d + l); incomplete blocks do not exist. Each run of d tokens is
    summed once, then l/d neighboring runs are added.
    """
    n = cfg.n_compressed(x.shape[1])
    x = x.to(accumulate_dtype(x.dtype))
    if n == 0:
        return x[:, :0]
    runs_per_block = cfg.l // cfg.d
    n_runs = n + runs_per_block - 1
    whole = x if x.shape[1] == n_runs * cfg.d else x[:, : n_runs * cfg.d]
    total = split_dim(whole, 1, cfg.d).sum(2).unfold(1, runs_per_block, 1).sum(-1)
    return total / cfg.l


def compress(x: Tensor, cfg: NSAConfig) -> Tensor:
    """Compressed keys or values [B,N,G,D]: pooled here for phi "avg", given for phi "mlp"."""
    if cfg.phi == "avg":
        return mean_pool(x, cfg)
    return x.to(accumulate_dtype(x.dtype))


def n_visible(positions: Tensor, n: int, cfg: NSAConfig) -> Tensor:
    """How many compression blocks each position sees: block i needs i*d + l - 1 <= t."""
    count = torch.div(positions + 1 - cfg.l, cfg.d, rounding_mode="floor") + 1
    return torch.clamp(count, 0, n)


def compressed_probabilities(q: Tensor, k: Tensor, positions: Tensor, cfg: NSAConfig) -> Tensor:
    """Softmax over the visible compressed keys only (equation 8).

    q [B,G,C,h,Dk] at `positions` [C], k [B,G,N,Dk], both of the accumulation type; returns
    [B,G,C,h,N]. A query that sees no compressed key gets a row of exact zeros.
    """
    logits = torch.einsum("bgchd,bgnd->bgchn", q, k) * cfg.d_k**-0.5
    n = k.shape[2]
    count = n_visible(positions, n, cfg)[:, None]
    visible = torch.arange(n, device=q.device) < count
    # A row without any visible key keeps finite logits: its softmax is discarded, not NaN.
    hidden = ~visible & (count > 0)
    logits = logits.masked_fill(hidden[:, None, :], float("-inf"))
    p: Tensor = logits.softmax(-1) * visible[:, None, :]
    return p


def overlap_weights(cfg: NSAConfig) -> list[tuple[int, int]]:
    """Equation 9 as (offset, weight): block j sums weight * p[j * l_sel/d + offset].

    Compression block i covers the stride-d units i .. i + l/d - 1, selection block j the units
    j*l_sel/d .. (j+1)*l_sel/d - 1; the weight is the number of units they share, which is what
    the equation's double sum counts. For l=32, d=16, l_sel=64: offsets -1..3, weights 1,2,2,2,1.
    """
    per_block, per_sel = cfg.l // cfg.d, cfg.l_sel // cfg.d
    pairs = []
    for offset in range(1 - per_block, per_sel):
        shared = min(offset + per_block, per_sel) - max(offset, 0)
        pairs.append((offset, shared))
    return pairs


def block_scores(p: Tensor, n_blocks: int, cfg: NSAConfig) -> Tensor:
    """Importance of each selection block (equation 9): p [..., N] to [..., n_blocks].

    Every block adds its terms in the same order, so equal probabilities give equal scores.
    """
    pairs = overlap_weights(cfg)
    step = cfg.l_sel // cfg.d
    lead = -pairs[0][0]
    length = lead + (n_blocks - 1) * step + pairs[-1][0] + 1
    firsts = [lead + offset for offset, _ in pairs]
    padded = torch.nn.functional.pad(p, (lead, max(0, length - lead - p.shape[-1])))
    terms = [padded[..., first : first + (n_blocks - 1) * step + 1 : step] for first in firsts]
    # The first block that overlaps shares one unit with it, so its weight is 1.
    total = terms[0]
    for term, (_, weight) in zip(terms[1:], pairs[1:], strict=True):
        total = torch.add(total, term, alpha=weight)
    return total
