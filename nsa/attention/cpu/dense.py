"""One contiguous piece: some rows of queries against a contiguous run of keys.

Shapes: G groups, M = tokens x heads rows, L keys. Queries arrive multiplied by 1/sqrt(d_k).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Scores of one piece should stay in the second-level cache.
PIECE_BYTES = 3 << 19
MIN_TOKENS, MAX_TOKENS = 32, 128


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Queries [start, stop) against keys [first, last).

    hide_head, hide_tail: bool [tokens, columns], True where a query must not see one of the first
    or last columns; None where it sees all. Hiding whole columns in between is not needed.
    """

    start: int
    stop: int
    first: int
    last: int
    hide_head: Tensor | None = None
    hide_tail: Tensor | None = None


class Workspace:
    """Score-sized scratch memory, reused by every piece of a call."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._kept: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int) -> Tensor:
        """Uninitialised memory of this shape; taking the same name again overwrites it."""
        size = 1
        for extent in shape:
            size *= extent
        kept = self._kept.get(name)
        if kept is None or kept.numel() < size:
            kept = self._like.new_empty(size)
            self._kept[name] = kept
        return kept[:size].view(shape)


def piece_tokens(groups: int, heads: int, keys: int, itemsize: int) -> int:
    """How many queries a piece may hold, so that its scores fit the cache."""
    fit = PIECE_BYTES // max(1, groups * heads * keys * itemsize)
    return max(MIN_TOKENS, min(MAX_TOKENS, fit))


def hide(scores: Tensor, piece: Piece, heads: int) -> None:
    """Set what the piece's queries must not see to minus infinity, in place."""
    tokens = piece.stop - piece.start
    grid = scores.unflatten(1, (tokens, heads))
    if piece.hide_head is not None:
        columns = piece.hide_head.shape[1]
        grid[..., :columns].masked_fill_(piece.hide_head[:, None], float("-inf"))
    if piece.hide_tail is not None and piece.hide_tail.shape[1]:
        columns = piece.hide_tail.shape[1]
        grid[..., -columns:].masked_fill_(piece.hide_tail[:, None], float("-inf"))


def exponentiate(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Turn scores [..., L] into exp(scores - max) in place; returns max and sum [..., 1].

    A row without any finite score becomes zeros, with the lowest finite maximum and sum 0.
    """
    top = scores.amax(-1, keepdim=True).clamp_min_(torch.finfo(scores.dtype).min)
    scores.sub_(top).exp_()
    return top, scores.sum(-1, keepdim=True)


def log_sum_exp(top: Tensor, total: Tensor) -> Tensor:
    """log(sum(exp)), and 0 for a row that sees nothing (its hidden scores stay at exp(-inf))."""
    return torch.where(total > 0, top + total.log(), 0)


def forward_piece(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    results: tuple[Tensor, Tensor],
    piece: Piece,
    heads: int,
    space: Workspace,
) -> tuple[Tensor, Tensor]:
    """Write output and log-sum-exp of q [G,M,Dk] on k, v to `results` ([G,M,Dv], [G,M,1]).

    Returns probabilities [G,M,L] still to be divided by their sums [G,M,1]; they live in the
    workspace until its next use. Rows that see nothing get output 0 and sum 0.
    """
    scores = space.take("scores", q.shape[0], q.shape[1], k.shape[1])
    torch.bmm(q, k.transpose(1, 2), out=scores)
    hide(scores, piece, heads)
    top, total = exponentiate(scores)
    out, lse = results
    # The smallest normal number only meets rows that see nothing: 0 / tiny is 0.
    torch.div(torch.bmm(scores, v), total.clamp_min(torch.finfo(v.dtype).tiny), out=out)
    lse.copy_(log_sum_exp(top, total))
    return scores, total


def backward_piece(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    minus_lse: Tensor,
    minus_delta: Tensor,
    sums: tuple[Tensor, Tensor, Tensor],
    piece: Piece,
    heads: int,
    space: Workspace,
) -> None:
    """Add this piece's gradients to `sums` = (dq [G,M,Dk], dk [G,L,Dk], dv [G,L,Dv]), in place.

    minus_lse, minus_delta [G,M,1]: -log-sum-exp and -<grad, out> of each row.
    """
    dq, dk, dv = sums
    shape = (q.shape[0], q.shape[1], k.shape[1])
    p = space.take("scores", *shape)
    torch.baddbmm(minus_lse, q, k.transpose(1, 2), out=p)
    hide(p, piece, heads)
    p.exp_()
    dv.baddbmm_(p.transpose(1, 2), grad)
    ds = space.take("gradients", *shape)
    torch.baddbmm(minus_delta, grad, v.transpose(1, 2), out=ds)
    ds.mul_(p)
    dk.baddbmm_(ds.transpose(1, 2), q)
    dq.baddbmm_(ds, k)


def causal_tail(start: int, stop: int, device: torch.device) -> Tensor:
    """True where a key of the last stop - start columns lies after the query."""
    size = stop - start
    return torch.ones(size, size, dtype=torch.bool, device=device).triu_(1)


def window_pieces(seq_len: int, w: int, tokens: int, device: torch.device) -> list[Piece]:
    """Cut sliding-window attention into pieces: query t sees keys t - w + 1 .. t."""
    pieces = []
    for start in range(0, seq_len, tokens):
        stop = min(start + tokens, seq_len)
        first = max(0, start + 1 - w)
        query = torch.arange(start, stop, device=device)[:, None]
        # Only the columns that leave the window before the piece's last query need hiding.
        leaving = max(0, stop - w - first)
        key = torch.arange(first, first + leaving, device=device)
        pieces.append(
            Piece(
                start=start,
                stop=stop,
                first=first,
                last=stop,
                hide_head=key <= query - w if leaving else None,
                hide_tail=causal_tail(start, stop, device),
            )
        )
    return pieces


def compressed_pieces(
    seq_len: int,
    l: int,
    d: int,
    tokens: int,
    n: int,
    device: torch.device,  # noqa: E741
) -> list[Piece]:
    """Cut the compressed branch into pieces; queries that see no block yet belong to none."""
    pieces = []
    for start in range(min(l - 1, seq_len), seq_len, tokens):
        stop = min(start + tokens, seq_len)
        least, most = (start + 1 - l) // d + 1, min(n, (stop - l) // d + 1)
        count = (torch.arange(start, stop, device=device)[:, None] + 1 - l) // d + 1
        hidden = torch.arange(least, most, device=device) >= count
        pieces.append(Piece(start=start, stop=stop, first=0, last=most, hide_tail=hidden))
    return pieces
