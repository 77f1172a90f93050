"""From compressed keys to the blocks that a kv group's heads attend to (equations 7 to 11).

Blocks become merged token ranges: plain loops (v1) and vectorized (v2) build the same sets. Both
take block indices [B,S,G,n] (any order, -1 for none, repeats allowed) at positions 0..S-1, or at
`positions` [S], and return [B,S,G,n,2] int64: ascending half-open ranges [start, end) of tokens,
neighboring blocks merged, cut off causally at t + 1, unused places (0, 0).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from nsa.attention.branches import split_dim
from nsa.attention.tracing import config_of, operator, profile_range, told
from nsa.attention.triton import words_of_bits
from nsa.config import FORCED_LOCAL_BLOCKS, NSAConfig, Ranges
from nsa.contract import SELECTION_RANGES


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


# More blocks than any sequence has.
_FAR = 1 << 32


def group_queries(q: Tensor, cfg: NSAConfig) -> Tensor:
    """View q [B,S,H,D] as [B,G,S,h,D]: the h query heads of a group side by side."""
    return split_dim(q, 2, cfg.heads_per_group).transpose(1, 2)


def top_blocks(scores: Tensor, positions: Tensor, cfg: NSAConfig) -> Tensor:
    """Pick n_sel blocks per query: scores [..., C, NB] at `positions` [C] to [..., C, n_sel].

    Block j is visible to t iff j*l_sel <= t. Block 0, the current block and the one before it
    are always taken, inside n_sel; the rest by descending score, ties to the lower index (a
    stable sort). Indices ascend; missing ones are -1, at the end. Each position has to see n_sel
    blocks, or all NB.
    """
    n_blocks = scores.shape[-1]
    block = torch.arange(n_blocks, device=scores.device)
    current = torch.div(positions, cfg.l_sel, rounding_mode="floor")[:, None]
    age = current - block
    forced = (block == 0) | (age < FORCED_LOCAL_BLOCKS)
    scores = scores.masked_fill(forced, float("inf")).masked_fill_(age < 0, float("-inf"))
    taken = min(cfg.n_sel, n_blocks)
    order = scores.sort(dim=-1, descending=True, stable=True).indices[..., :taken]
    order = order.sort(-1).values
    if taken == cfg.n_sel:
        return order
    return torch.nn.functional.pad(order, (0, cfg.n_sel - taken), value=-1)


class Picker:
    """Collects the blocks of all queries in `picked`: parts [groups, tokens, n_sel].

    Those before `first` select all that they see; the others choose, by parts of ascending queries.
    """

    def __init__(self, cfg: NSAConfig, positions: Tensor, groups: int) -> None:
        """positions [S]; those that must choose, but see no compressed key yet, have chosen."""
        self.cfg, self.positions = cfg, positions
        self.first = min(positions.numel(), cfg.n_sel * cfg.l_sel)
        block = torch.arange(cfg.n_sel, device=positions.device)
        current = positions[: self.first, None] // cfg.l_sel
        self.picked = [block.masked_fill(block > current, -1).expand(groups, -1, -1)]
        blind = min(cfg.l - 1, positions.numel())
        if self.first < blind:
            nothing = positions.new_zeros(groups, blind - self.first, 0, dtype=torch.float32)
            self.take(nothing, self.first)

    def take(self, summed: Tensor, start: int) -> None:
        """Choose for queries from `start` on, by probabilities of their groups [groups,C,N]."""
        stop = start + summed.shape[1]
        scores = block_scores(summed, self.cfg.n_blocks(stop), self.cfg)
        self.picked.append(top_blocks(scores, self.positions[start:stop], self.cfg))


@torch.no_grad()
def pick_blocks(p: Tensor, positions: Tensor, n_blocks: int, cfg: NSAConfig) -> Tensor:
    """Selected blocks [B,G,C,n_sel] from the probabilities p [B,G,C,h,N] of `positions` [C].

    Equation 10: the importance of a block is summed over the query heads of its group, so that
    all of them read the same blocks.
    """
    return top_blocks(block_scores(p.sum(3), n_blocks, cfg), positions, cfg)


def _positions(blocks: Tensor, positions: Tensor | None) -> Tensor:
    if positions is not None:
        return positions
    return torch.arange(blocks.shape[1], device=blocks.device)


def _merge(indices: list[int], t: int, l_sel: int) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for block in sorted({b for b in indices if b >= 0}):
        start, end = block * l_sel, min((block + 1) * l_sel, t + 1)
        if start > t:
            continue
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def ranges_v1(blocks: Tensor, cfg: NSAConfig, positions: Tensor | None = None) -> Tensor:
    """Merged token ranges [B,S,G,n,2] by plain loops: the readable reference."""
    n = blocks.shape[-1]
    times = _positions(blocks, positions).tolist()
    rows = []
    for batch in blocks.tolist():
        for t, groups in zip(times, batch, strict=True):
            for indices in groups:
                merged = _merge(indices, t, cfg.l_sel)
                rows.append(merged + [(0, 0)] * (n - len(merged)))
    return torch.tensor(rows, dtype=torch.int64, device=blocks.device).reshape(*blocks.shape, 2)


def ranges_v2(blocks: Tensor, cfg: NSAConfig, positions: Tensor | None = None) -> Tensor:
    """Merged token ranges [B,S,G,n,2], vectorized: no host loop, no synchronization."""
    times = _positions(blocks, positions)[None, :, None, None]
    # Modulo makes -1 a block far beyond every token: not visible, like any that begins after t.
    ordered = (blocks % _FAR * cfg.l_sel).sort(-1).values
    hidden = ordered > times
    before = torch.nn.functional.pad(ordered[..., :-1], (1, 0), value=-2 * cfg.l_sel)
    opens = ordered - before > cfg.l_sel
    # The k-th opening owns range k; everything hidden is sent to a spare place at the end.
    n = blocks.shape[-1]
    owner = (opens.cumsum(-1) - 1).masked_fill_(hidden, n)
    end_of = torch.minimum(ordered + cfg.l_sel, times + 1)
    empty = torch.zeros((*blocks.shape[:-1], n + 1), dtype=torch.int64, device=blocks.device)
    starts = empty.scatter_reduce(-1, owner, ordered, "amin", include_self=False)
    ends = empty.scatter_reduce(-1, owner, end_of, "amax")
    return torch.stack((starts[..., :n], ends[..., :n]), -1)


@operator(lambda blocks, _: blocks.new_empty(*blocks.shape, 2))
def ranges_by_loops(blocks: Tensor, cfg: str) -> Tensor:
    """`ranges_v1` at positions 0..S-1 for a compiler, which cannot look into plain loops."""
    return ranges_v1(blocks, config_of(cfg))


def build_ranges(
    blocks: Tensor,
    cfg: NSAConfig,
    version: Ranges,
    positions: Tensor | None = None,
) -> Tensor:
    """Merged token ranges by the chosen version, under its profiler range."""
    build = ranges_v1 if version == "v1" else ranges_v2
    with profile_range(SELECTION_RANGES[version]):
        if version == "v1" and positions is None and torch.compiler.is_compiling():
            return ranges_by_loops(blocks, told(cfg))
        return build(blocks, cfg, positions)


def block_map(ranges: Tensor, n_blocks: int, cfg: NSAConfig) -> Tensor:
    """Which blocks the ranges [..., n, 2] cover: bool [..., n_blocks].

    Ranges start on a block's first token and end on a block's end or inside the current block.
    """
    first = torch.div(ranges[..., 0], cfg.l_sel, rounding_mode="floor")
    last = torch.div(ranges[..., 1] + (cfg.l_sel - 1), cfg.l_sel, rounding_mode="floor")
    steps = torch.zeros((*ranges.shape[:-2], n_blocks + 1), dtype=torch.int32, device=ranges.device)
    steps.scatter_(-1, first, 1, reduce="add").scatter_(-1, last, -1, reduce="add")
    return steps[..., :n_blocks].cumsum(-1) > 0


def block_bits(ranges: Tensor, cfg: NSAConfig) -> Tensor:
    """The same of ranges [B,S,G,n,2] as int32 [B*G, words, S], bits as `words_of_bits` has them."""
    words = words_of_bits(ranges.shape[1], cfg.l_sel)
    covered = split_dim(block_map(ranges, 32 * words, cfg).to(torch.int32), 3, 32)
    bit = torch.arange(32, dtype=torch.int32, device=ranges.device)
    packed = (covered << bit).sum(-1, dtype=torch.int32)
    return packed.permute(0, 2, 3, 1).flatten(0, 1).contiguous()
