"""How one call is cut into pieces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch

from nsa.attention.cpu.dense import Edge, Piece, piece_tokens
from nsa.config import NSAConfig

PARTIAL_BYTES = 32 << 20


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The dense pieces of each branch.

    full: the first query that must choose among blocks (or the sequence's length); the ones
    before see at most n_sel blocks, select all, and are plain causal attention. stretches:
    [start, stop) of the others, cut so that their partial results stay small. ahead: hides what
    lies after each query of a block.
    """

    cfg: NSAConfig
    seq_len: int
    full: int
    cmp: tuple[Piece, ...]
    sel: tuple[Piece, ...]
    win: tuple[Piece, ...]
    stretches: tuple[tuple[int, int], ...]
    ahead: Edge


@lru_cache(maxsize=16)
def schedule(cfg: NSAConfig, seq_len: int, n: int, dtype: torch.dtype) -> Schedule:
    """Cut a sequence with n compressed keys into pieces whose scores fit the cache."""

    def tokens(keys: int) -> int:
        return piece_tokens(cfg.n_kv_groups, cfg.heads_per_group, keys, dtype.itemsize)

    full = min(seq_len, cfg.n_sel * cfg.l_sel)
    return Schedule(
        cfg=cfg,
        seq_len=seq_len,
        full=full,
        cmp=tuple(_compressed(cfg, seq_len, tokens(max(1, n)), n, dtype)),
        sel=tuple(_window(full, full, tokens(full), dtype)),
        win=tuple(_window(seq_len, cfg.w, tokens(min(seq_len, cfg.w)), dtype)),
        stretches=tuple(_stretches(cfg, full, seq_len, dtype)),
        ahead=_ahead(cfg.l_sel, dtype),
    )


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
