"""Contiguous pieces, some rows of queries against a run of keys, and how a call is cut into them.

Shapes: G groups, M = tokens x heads rows, L keys. Keys arrive multiplied by 1/sqrt(d_k).

Exponentials of minus infinity, or of anything that underflows, take a path in the vector library
that is ten to a hundred times slower than the normal one. So where torch's softmax, which knows
minus infinity, does not take them, arguments are cut off where the result is far below rounding of
the row's sum (which is at least 1), and hidden keys are then multiplied by an exact 0.
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


_threads = threading.local()


class Workspace:
    """Named scratch tensors of one type, which outlive a call.

    Fresh memory costs a page fault per 4 KiB, which at these sizes is a tenth of the whole layer;
    so one thread's calls share their scratch, whose size the cutting of the work bounds.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._kept: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int) -> Tensor:
        """Uninitialized memory of this shape; taking the same name again overwrites it."""
        size = math.prod(shape)
        kept = self._kept.get(name)
        if kept is None or kept.numel() < size:
            self._kept.pop(name, None)
            kept = torch.empty(size, dtype=self._dtype)
            self._kept[name] = kept
        return kept[:size].view(shape)


def workspace(dtype: torch.dtype) -> Workspace:
    """This thread's workspace for a type."""
    spaces: dict[torch.dtype, Workspace] | None = getattr(_threads, "spaces", None)
    if spaces is None:
        spaces = {}
        _threads.spaces = spaces
    if dtype not in spaces:
        spaces[dtype] = Workspace(dtype)
    return spaces[dtype]


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


def lowest(dtype: torch.dtype) -> float:
    """Smallest argument given to exp: its result vanishes beside a sum of at least 1."""
    return -700.0 if dtype == torch.float64 else -80.0


def exponentiate(scores: Tensor, top: Tensor) -> Tensor:
    """Turn scores [..., L] into exp(scores - max) in place; writes the maxima to top [..., 1].

    Hidden scores (minus infinity) come out tiny, not 0: erase them. A row of hidden scores only
    has the lowest finite maximum.
    """
    torch.amax(scores, -1, keepdim=True, out=top)
    top.clamp_min_(torch.finfo(scores.dtype).min)
    return scores.sub_(top).clamp_min_(lowest(scores.dtype)).exp_()


def recover(scores_minus_lse: Tensor) -> Tensor:
    """Probabilities from scores - lse, in place; hidden ones come out finite: erase them."""
    low = lowest(scores_minus_lse.dtype)
    return scores_minus_lse.clamp_(low, 0.0).exp_()


def forward_piece(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    results: tuple[Tensor, Tensor],
    piece: Piece,
    heads: int,
    space: Workspace,
    kept: list[Tensor] | None = None,
) -> Tensor:
    """Write output and log-sum-exp of q [G,M,Dk] on k, v to `results` ([G,M,Dv], [G,M,1]).

    Every row sees a key. Returns probabilities [G,M,L], which live in the workspace until its next
    use, or for as long as in `kept`, to which they are added.
    """
    groups, rows = q.shape[:2]
    scores = space.take("scores", groups, rows, k.shape[1])
    torch.bmm(q, k.transpose(1, 2), out=scores)
    piece.cover(scores, heads)
    top = torch.amax(scores, -1, keepdim=True, out=space.take("top", groups, rows, 1))
    if kept is None:
        p = torch.softmax(scores, -1, out=space.take("probabilities", *scores.shape))
    else:
        p = scores.softmax(-1)
        kept.append(p)
    out, lse = results
    torch.bmm(p, v, out=out)
    # The largest probability is 1 over the sum of exp(score - top).
    largest = torch.amax(p, -1, keepdim=True, out=space.take("total", groups, rows, 1))
    torch.sub(top, largest.log_(), out=lse)
    return p


def backward_piece(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    minus: Tensor,
    sums: tuple[Tensor, Tensor, Tensor],
    piece: Piece,
    heads: int,
    space: Workspace,
    p: Tensor | None = None,
) -> None:
    """Add this piece's gradients to `sums` = (dq [G,M,Dk], dk [G,L,Dk], dv [G,L,Dv]), in place.

    minus [G,M,2]: -log-sum-exp and -<grad, out> of each row. p: probabilities, where they were
    kept.
    """
    dq, dk, dv = sums
    shape = (q.shape[0], q.shape[1], k.shape[1])
    if p is None:
        p = space.take("scores", *shape)
        torch.baddbmm(minus[..., 0:1], q, k.transpose(1, 2), out=p)
        recover(p)
        piece.erase(p, heads)
    dv.baddbmm_(p.transpose(1, 2), grad)
    ds = space.take("gradients", *shape)
    torch.baddbmm(minus[..., 1:2], grad, v.transpose(1, 2), out=ds)
    ds.mul_(p)
    dk.baddbmm_(ds.transpose(1, 2), q)
    dq.baddbmm_(ds, k)


PARTIAL_BYTES = 32 << 20


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
    heads = cfg.heads_per_group
    return piece_tokens(cfg.n_kv_groups, heads, seq_len, dtype.itemsize) >= seq_len


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
