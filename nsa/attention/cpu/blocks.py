"""Selected attention, block by block: every key block meets exactly the queries that chose it.

The pairs (block, query) of a stretch of queries are sorted by block. A block's queries are
gathered, multiplied with its keys and values at full matrix rate, and leave one partial result
per pair; a weighted gather puts each query's n_sel partial results together. Work is exactly
that of the selected tokens; the only large memory is one partial result per pair.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from nsa.attention.cpu.dense import Workspace, exponentiate

STRETCH = 2048  # queries whose pairs are held at once
SPLIT = 512  # queries of one block handled at once


@dataclass(frozen=True, kw_only=True)
class Run:
    """Pairs [low, high) of one block: its keys [first, last), queries `tokens` (in the stretch).

    diagonal: how many of the first queries lie inside the block and must not look ahead.
    """

    low: int
    high: int
    first: int
    last: int
    tokens: Tensor
    diagonal: int


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """All pairs of queries [start, stop) of one group.

    runs: in block order. members [tokens*h, n_sel]: the partial results (pair*h + head) of each
    query head.
    """

    start: int
    stop: int
    n_pairs: int
    runs: list[Run]
    members: Tensor


def pair_up(chosen: Tensor, start: int, seq_len: int, l_sel: int, heads: int) -> Pairs:
    """Sort the pairs of a stretch by block, from chosen bool [tokens, NB].

    Every query has chosen equally many blocks; the stretch starts on a block's first token.
    """
    tokens = chosen.shape[0]
    by_block = chosen.T.contiguous()
    query = by_block.nonzero()[:, 1]
    counts = by_block.sum(1).tolist()
    number = (by_block.flatten().cumsum(0) - 1).view(by_block.shape)
    mine = number.T[chosen].view(tokens, 1, -1)
    head = torch.arange(heads, device=chosen.device)[None, :, None]
    members = (mine * heads + head).flatten(0, 1)
    runs = list(_runs(counts, query, start, seq_len, l_sel))
    return Pairs(
        start=start, stop=start + tokens, n_pairs=query.numel(), runs=runs, members=members
    )


def _runs(counts: list[int], query: Tensor, start: int, seq_len: int, l_sel: int) -> Iterator[Run]:
    low = 0
    for block, count in enumerate(counts):
        first, last = block * l_sel, min((block + 1) * l_sel, seq_len)
        # Inside its own block every query chose it, so those come first and in order.
        inside = last - first if first >= start else 0
        for offset in range(0, count, SPLIT):
            size = min(SPLIT, count - offset)
            yield Run(
                low=low + offset,
                high=low + offset + size,
                first=first,
                last=last,
                tokens=query[low + offset : low + offset + size],
                diagonal=max(0, min(inside - offset, size)),
            )
        low += count


def _look_back(scores: Tensor, run: Run, heads: int, offset: int) -> None:
    """Hide keys after the query in the rows that lie inside the block."""
    if run.diagonal:
        width = scores.shape[-1]
        hidden = torch.ones(run.diagonal, width, dtype=torch.bool, device=scores.device)
        hidden.triu_(1 + offset)
        rows = scores[: run.diagonal * heads].unflatten(0, (run.diagonal, heads))
        rows.masked_fill_(hidden[:, None], float("-inf"))


def forward_blocks(
    q: Tensor, k: Tensor, v: Tensor, pairs: Pairs, heads: int, space: Workspace
) -> tuple[Tensor, Tensor]:
    """Output [tokens*h, Dv] and log-sum-exp [tokens*h, 1] of q [tokens, h*Dk] on k, v [S,D]."""
    rows, d_k = pairs.n_pairs * heads, k.shape[1]
    partial = space.take("partial", rows, v.shape[1])
    top, total = q.new_empty(rows, 1), q.new_empty(rows, 1)
    inside = 0
    for run in pairs.runs:
        part = slice(run.low * heads, run.high * heads)
        queries = q.index_select(0, run.tokens).view(-1, d_k)
        scores = space.take("scores", queries.shape[0], run.last - run.first)
        torch.mm(queries, k[run.first : run.last].T, out=scores)
        inside = _diagonal_offset(run, pairs.start)
        _look_back(scores, run, heads, inside)
        top[part], total[part] = exponentiate(scores)
        torch.mm(scores, v[run.first : run.last], out=partial[part])
    peak = top.view(-1)[pairs.members]
    highest = peak.amax(-1, keepdim=True)
    weight = (peak - highest).exp_()
    whole = (weight * total.view(-1)[pairs.members]).sum(-1, keepdim=True)
    out = embedding_bag(pairs.members, partial, mode="sum", per_sample_weights=weight / whole)
    return out, highest + whole.log()


def _diagonal_offset(run: Run, start: int) -> int:
    """Place inside its block of the run's first query, where the run is on the diagonal."""
    return int(run.tokens[0]) + start - run.first if run.diagonal else 0


def backward_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    minus_lse: Tensor,
    minus_delta: Tensor,
    sums: tuple[Tensor, Tensor, Tensor],
    pairs: Pairs,
    heads: int,
    space: Workspace,
) -> None:
    """Add gradients to `sums` = (dq [tokens*h, Dk], dk [S,Dk], dv [S,Dv]), in place.

    q [tokens, h*Dk], grad [tokens, h*Dv], minus_lse and minus_delta [tokens, h] of the stretch.
    """
    dq, dk, dv = sums
    d_k, d_v = k.shape[1], v.shape[1]
    partial = space.take("partial", pairs.n_pairs * heads, d_k)
    for run in pairs.runs:
        keys, values = k[run.first : run.last], v[run.first : run.last]
        queries = q.index_select(0, run.tokens).view(-1, d_k)
        grads = grad.index_select(0, run.tokens).view(-1, d_v)
        lse = minus_lse.index_select(0, run.tokens).view(-1, 1)
        delta = minus_delta.index_select(0, run.tokens).view(-1, 1)
        p = space.take("scores", queries.shape[0], keys.shape[0])
        torch.addmm(lse, queries, keys.T, out=p)
        _look_back(p, run, heads, _diagonal_offset(run, pairs.start))
        p.exp_()
        dv[run.first : run.last].addmm_(p.T, grads)
        ds = space.take("gradients", queries.shape[0], keys.shape[0])
        torch.addmm(delta, grads, values.T, out=ds)
        ds.mul_(p)
        dk[run.first : run.last].addmm_(ds.T, queries)
        torch.mm(ds, keys, out=partial[run.low * heads : run.high * heads])
    dq.add_(embedding_bag(pairs.members, partial, mode="sum"))
