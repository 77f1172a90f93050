"""Selected blocks as merged token ranges: plain loops (v1) and vectorised (v2), the same sets.

Both take block indices [B,S,G,n] (any order, -1 for none, repeats allowed) at positions 0..S-1,
or at `positions` [S], and return [B,S,G,n,2] int64: ascending half-open ranges [start, end) of
tokens, neighbouring blocks merged, cut off causally at t + 1, unused places (0, 0).
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.config import NSAConfig, Ranges
from nsa.contract import SELECTION_RANGES
from nsa.ranges import profile_range


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
    """Merged token ranges [B,S,G,n,2], vectorised: no host loop, no synchronisation."""
    times = _positions(blocks, positions)[None, :, None, None]
    far = torch.iinfo(torch.int64).max
    usable = (blocks >= 0) & (blocks * cfg.l_sel <= times)
    ordered = torch.where(usable, blocks, far).sort(-1).values
    usable = ordered < far
    before = torch.nn.functional.pad(ordered[..., :-1], (1, 0), value=-2)
    opens = usable & (ordered - before > 1)
    # The k-th opening owns range k; everything unusable is sent to a spare place at the end.
    n = blocks.shape[-1]
    owner = torch.where(usable, opens.cumsum(-1) - 1, n)
    safe = torch.where(usable, ordered, 0)
    start_of = torch.where(opens, safe * cfg.l_sel, 0)
    end_of = torch.where(usable, torch.minimum((safe + 1) * cfg.l_sel, times + 1), 0)
    empty = torch.zeros((*blocks.shape[:-1], n + 1), dtype=torch.int64, device=blocks.device)
    starts = empty.scatter_add(-1, owner, start_of)
    ends = empty.scatter_reduce(-1, owner, end_of, "amax")
    return torch.stack((starts[..., :n], ends[..., :n]), -1)


def build_ranges(
    blocks: Tensor, cfg: NSAConfig, version: Ranges, positions: Tensor | None = None
) -> Tensor:
    """Merged token ranges by the chosen version, under its profiler range."""
    build = ranges_v1 if version == "v1" else ranges_v2
    with profile_range(SELECTION_RANGES[version]):
        return build(blocks, cfg, positions)


def block_map(ranges: Tensor, n_blocks: int, cfg: NSAConfig) -> Tensor:
    """Which blocks the ranges [..., n, 2] cover: bool [..., n_blocks].

    Ranges start on a block's first token and end on a block's end or inside the current block.
    """
    first = torch.div(ranges[..., 0], cfg.l_sel, rounding_mode="floor")
    last = torch.div(ranges[..., 1] + cfg.l_sel - 1, cfg.l_sel, rounding_mode="floor")
    steps = torch.zeros((*ranges.shape[:-2], n_blocks + 1), dtype=torch.int32, device=ranges.device)
    one = torch.ones((), dtype=torch.int32, device=ranges.device).expand(first.shape)
    steps.scatter_add_(-1, first, one)
    steps.scatter_add_(-1, last, -one)
    return steps[..., :n_blocks].cumsum(-1) > 0


def range_tokens(ranges: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Token indices of ranges [..., n, 2] in order: index and valid, both [..., width]."""
    lengths = ranges[..., 1] - ranges[..., 0]
    ends = lengths.cumsum(-1)
    place = torch.arange(width, device=ranges.device).expand(*ranges.shape[:-2], width).contiguous()
    owner = torch.searchsorted(ends, place, right=True).clamp_max(ranges.shape[-2] - 1)
    offset = ranges[..., 0] - (ends - lengths)
    valid = place < ends[..., -1:]
    return torch.where(valid, place + offset.gather(-1, owner), 0), valid
