"""How a call is cut: dense pieces, queries against a run of keys, and pairs of block and query.

Shapes: G groups, M = tokens x heads rows, L keys. Of selected attention every key block meets
exactly the queries that chose it: the pairs (block, query) of a stretch of queries are sorted by
block.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from nsa.config import NSAConfig

# Scores of one piece, and as much again, should stay in the second-level cache.
PIECE_BYTES = 3 << 18
MIN_TOKENS, MAX_TOKENS = 32, 128
PARTIAL_BYTES = 32 << 20
SPLIT = 512  # queries of one block handled at once


class Workspace(threading.local):
    """Named scratch tensors of a thread, which outlive a call.

    Fresh memory costs a page fault per 4 KiB, which at these sizes is a tenth of the whole layer;
    so one thread's calls share their scratch, whose size the cutting of the work bounds.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        """Uninitialized memory of this shape; taking the same name again overwrites it."""
        key, size = (name, dtype), math.prod(shape)
        kept = self._kept.get(key)
        if kept is None or kept.numel() < size:
            self._kept.pop(key, None)
            kept = torch.empty(size, dtype=dtype)
            self._kept[key] = kept
        return kept[:size].view(shape)


WORKSPACE = Workspace()


@dataclass(frozen=True, kw_only=True)
class Edge:
    """Columns of a piece that some of its queries must not see.

    bias, keep: [tokens, 1, columns], [G, tokens, 1, columns] where groups differ; minus infinity
    and 0 where hidden, 0 and 1 elsewhere.
    """

    columns: slice
    bias: Tensor
    keep: Tensor

    @staticmethod
    def hiding(hidden: Tensor, columns: slice, dtype: torch.dtype) -> Edge:
        """An edge from hidden bool [tokens, columns] or [G, tokens, columns]."""
        bias = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
        keep = (~hidden).to(dtype)
        return Edge(columns=columns, bias=bias.unsqueeze(-2), keep=keep.unsqueeze(-2))


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Queries [start, stop) against keys [first, last), whole but for the edges."""

    start: int
    stop: int
    first: int
    last: int
    edges: tuple[Edge, ...]

    def rows(self, heads: int) -> slice:
        """Where its queries' heads lie among all rows."""
        return slice(self.start * heads, self.stop * heads)

    def cover(self, scores: Tensor, heads: int) -> None:
        """Set hidden scores [G,M,L] to minus infinity, in place."""
        grid = scores.view(scores.shape[0], -1, heads, scores.shape[-1])
        for edge in self.edges:
            grid[..., edge.columns].add_(edge.bias)

    def erase(self, weights: Tensor, heads: int) -> None:
        """Set hidden weights [G,M,L] to exactly 0, in place."""
        grid = weights.view(weights.shape[0], -1, heads, weights.shape[-1])
        for edge in self.edges:
            grid[..., edge.columns].mul_(edge.keep)


def piece_tokens(groups: int, heads: int, keys: int, itemsize: int) -> int:
    """How many queries a piece may hold, so that its scores fit the cache."""
    fit = PIECE_BYTES // max(1, groups * heads * keys * itemsize)
    return max(MIN_TOKENS, min(MAX_TOKENS, fit))


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The dense pieces of each branch.

    full: the first query that must choose among blocks (or the sequence's length); the ones
    before see at most n_sel blocks, select all, and are plain causal attention. stretches:
    [start, stop) of the others, cut so that their partial results stay small. ahead: hides what
    lies after each query of a block. masked: `one_piece`, whose `sel` and stretches are empty.
    """

    cfg: NSAConfig
    seq_len: int
    full: int
    cmp: tuple[Piece, ...]
    sel: tuple[Piece, ...]
    win: tuple[Piece, ...]
    stretches: tuple[tuple[int, int], ...]
    ahead: Edge
    masked: bool

    @property
    def scale(self) -> float:
        """Of the scores; keys are multiplied by it once."""
        return float(self.cfg.d_k**-0.5)


def schedule(cfg: NSAConfig, seq_len: int, n: int, dtype: torch.dtype) -> Schedule:
    """Cut a sequence with n compressed keys into pieces whose scores fit the cache."""
    return _schedule(cfg, seq_len, n, dtype, (MIN_TOKENS, PIECE_BYTES, PARTIAL_BYTES))


@lru_cache(maxsize=16)
def _schedule(
    cfg: NSAConfig, seq_len: int, n: int, dtype: torch.dtype, _sizes: tuple[int, ...]
) -> Schedule:

    def tokens(keys: int) -> int:
        return piece_tokens(cfg.n_kv_groups, cfg.heads_per_group, keys, dtype.itemsize)

    full = min(seq_len, cfg.n_sel * cfg.l_sel)
    masked = full < seq_len and one_piece(cfg, seq_len, dtype)
    return Schedule(
        cfg=cfg,
        seq_len=seq_len,
        full=full,
        cmp=tuple(_compressed(cfg, seq_len, tokens(max(1, n)), n, dtype)),
        sel=() if masked else tuple(_window(full, full, tokens(full), dtype)),
        win=tuple(_window(seq_len, cfg.w, tokens(min(seq_len, cfg.w)), dtype)),
        stretches=() if masked else tuple(_stretches(cfg, full, seq_len, dtype)),
        ahead=_ahead(cfg.l_sel, dtype),
        masked=masked,
    )


def one_piece(cfg: NSAConfig, seq_len: int, dtype: torch.dtype) -> bool:
    """Is a sequence so short that the scores of all its queries and keys are one piece?

    Then what blocks would save is less than what many small products cost.
    """
    return piece_tokens(cfg.n_kv_groups, cfg.heads_per_group, seq_len, dtype.itemsize) >= seq_len


def masked_piece(chosen: Tensor, cut: Schedule) -> Piece:
    """All queries against all keys but those of blocks that are not chosen [G,S,NB], or ahead."""
    cfg, size = cut.cfg, cut.seq_len
    tokens = chosen.repeat_interleave(cfg.l_sel, -1)[..., :size].tril()
    hiding = Edge.hiding(~tokens, slice(None), cut.ahead.bias.dtype)
    return Piece(start=0, stop=size, first=0, last=size, edges=(hiding,))


def _stretches(
    cfg: NSAConfig, full: int, seq_len: int, dtype: torch.dtype
) -> Iterator[tuple[int, int]]:
    """Even stretches on block boundaries, a group's partial results within PARTIAL_BYTES."""
    per_token = cfg.n_sel * cfg.heads_per_group * max(cfg.d_k, cfg.d_v) * dtype.itemsize
    blocks = cfg.n_blocks(seq_len) - full // cfg.l_sel
    most = max(1, PARTIAL_BYTES // (per_token * cfg.l_sel))
    size = -(-blocks // max(1, -(-blocks // most))) * cfg.l_sel
    for start in range(full, seq_len, size or 1):
        yield start, min(start + size, seq_len)


def _ahead(size: int, dtype: torch.dtype) -> Edge:
    """Hide, in the last `size` columns, the keys after each of `size` queries."""
    return Edge.hiding(torch.ones(size, size).triu_(1) > 0, slice(-size, None), dtype)


def _window(seq_len: int, w: int, tokens: int, dtype: torch.dtype) -> Iterator[Piece]:
    """Sliding-window attention: query t sees keys t - w + 1 .. t."""
    ahead: dict[int, Edge] = {}
    behind: dict[tuple[int, int], Edge] = {}
    for start in range(0, seq_len, tokens):
        stop = min(start + tokens, seq_len)
        first, size = max(0, start + 1 - w), stop - start
        if size not in ahead:
            ahead[size] = _ahead(size, dtype)
        ends = [ahead[size]]
        # Columns that leave the window before the piece's last query.
        leaving = max(0, stop - w - first)
        if leaving:
            lag = start - first
            if (size, lag) not in behind:
                query, key = torch.arange(size)[:, None] + lag, torch.arange(leaving)
                behind[size, lag] = Edge.hiding(key <= query - w, slice(0, leaving), dtype)
            ends.append(behind[size, lag])
        yield Piece(start=start, stop=stop, first=first, last=stop, edges=tuple(ends))


def _compressed(
    cfg: NSAConfig, seq_len: int, tokens: int, n: int, dtype: torch.dtype
) -> Iterator[Piece]:
    """The compressed branch; queries that see no block yet belong to no piece."""
    for start in range(min(cfg.l - 1, seq_len), seq_len, tokens):
        stop = min(start + tokens, seq_len)
        least, most = cfg.n_compressed(start + 1), min(n, cfg.n_compressed(stop))
        count = (torch.arange(start, stop)[:, None] + 1 - cfg.l) // cfg.d + 1
        edges: tuple[Edge, ...] = ()
        if most > least:
            hidden = torch.arange(least, most) >= count
            edges = (Edge.hiding(hidden, slice(least, most), dtype),)
        yield Piece(start=start, stop=stop, first=0, last=most, edges=edges)


@dataclass(frozen=True, kw_only=True)
class Run:
    """Pairs [low, high) of one block: its keys [first, last), queries `tokens` (in the stretch).

    diagonal: how many of the first queries lie inside the block and must not look ahead; place:
    where in the block they begin.
    """

    low: int
    high: int
    first: int
    last: int
    tokens: Tensor
    diagonal: int
    place: int


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """All pairs of a stretch of queries of one group.

    runs: in block order. members [tokens*h, n_sel]: the partial results (pair*h + head) of each
    query head.
    """

    n_pairs: int
    runs: list[Run]
    members: Tensor


def _pair_up(chosen: Tensor, start: int, cut: Schedule) -> Pairs:
    """Sort the pairs of a stretch by block, from chosen bool [tokens, NB].

    Every query has chosen equally many blocks; the stretch starts on a block's first token.
    """
    tokens = chosen.shape[0]
    by_block = chosen.T.contiguous()
    query = by_block.nonzero()[:, 1]
    counts = by_block.sum(1).tolist()
    number = (by_block.flatten().cumsum(0) - 1).view(by_block.shape)
    mine = number.T[chosen].view(tokens, 1, -1)
    heads = cut.cfg.heads_per_group
    members = (mine * heads + torch.arange(heads)[None, :, None]).flatten(0, 1)
    runs = list(_runs(counts, query, start, cut))
    return Pairs(n_pairs=query.numel(), runs=runs, members=members)


def _runs(counts: list[int], query: Tensor, start: int, cut: Schedule) -> Iterator[Run]:
    low, l_sel = 0, cut.cfg.l_sel
    for block, count in enumerate(counts):
        first, last = block * l_sel, min((block + 1) * l_sel, cut.seq_len)
        # Inside its own block every query chose it, so those come first and in order.
        inside = last - first if first >= start else 0
        even = -(-count // max(1, -(-count // SPLIT)))
        for offset in range(0, count, even or 1):
            size = min(even, count - offset)
            yield Run(
                low=low + offset,
                high=low + offset + size,
                first=first,
                last=last,
                tokens=query[low + offset : low + offset + size],
                diagonal=max(0, min(inside - offset, size)),
                place=offset,
            )
        low += count


def pair_stretches(chosen: Tensor, cut: Schedule) -> list[list[Pairs]]:
    """Who meets whom, by group and stretch, from chosen bool [G,S-full,NB] of one batch element."""
    full = cut.full
    return [
        [_pair_up(mine[start - full : stop - full], start, cut) for start, stop in cut.stretches]
        for mine in chosen
    ]
