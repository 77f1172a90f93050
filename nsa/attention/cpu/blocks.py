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

from nsa.attention.cpu.dense import Edge, Workspace, exponentiate, recover

SPLIT = 512  # queries of one block handled at once


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
    return Pairs(n_pairs=query.numel(), runs=runs, members=members)


def _runs(counts: list[int], query: Tensor, start: int, seq_len: int, l_sel: int) -> Iterator[Run]:
    low = 0
    for block, count in enumerate(counts):
        first, last = block * l_sel, min((block + 1) * l_sel, seq_len)
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


def _inside(scores: Tensor, run: Run, heads: int, edge: Tensor) -> tuple[Tensor, Tensor]:
    """Scores [diagonal, heads, L] of the rows inside the block, and the edge's part for them."""
    rows = scores[: run.diagonal * heads].view(run.diagonal, heads, -1)
    return rows, edge[run.place : run.place + run.diagonal, :, : rows.shape[-1]]


def forward_blocks(
    q: Tensor, k: Tensor, v: Tensor, pairs: Pairs, heads: int, ahead: Edge, space: Workspace
) -> tuple[Tensor, Tensor]:
    """Output [tokens*h, Dv] and log-sum-exp [tokens*h, 1] of q [tokens, h*Dk] on k, v [S,D]."""
    rows, d_k = pairs.n_pairs * heads, k.shape[1]
    partial = space.take("partial", rows, v.shape[1])
    top, total = space.take("top", rows, 1), space.take("total", rows, 1)
    for run in pairs.runs:
        part = slice(run.low * heads, run.high * heads)
        size = (run.high - run.low) * heads
        queries = space.take("queries", run.high - run.low, q.shape[1])
        torch.index_select(q, 0, run.tokens, out=queries)
        scores = space.take("scores", size, run.last - run.first)
        torch.mm(queries.view(size, d_k), k[run.first : run.last].T, out=scores)
        if run.diagonal:
            mine, bias = _inside(scores, run, heads, ahead.bias)
            mine.add_(bias)
        exponentiate(scores, top[part])
        if run.diagonal:
            mine, keep = _inside(scores, run, heads, ahead.keep)
            mine.mul_(keep)
        torch.sum(scores, -1, keepdim=True, out=total[part])
        torch.mm(scores, v[run.first : run.last], out=partial[part])
    peak = top.view(-1)[pairs.members]
    highest = peak.amax(-1, keepdim=True)
    weight = peak.sub_(highest).exp_()
    whole = (weight * total.view(-1)[pairs.members]).sum(-1, keepdim=True)
    out = embedding_bag(pairs.members, partial, mode="sum", per_sample_weights=weight.div_(whole))
    return out, highest + whole.log()


def backward_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    minus: Tensor,
    sums: tuple[Tensor, Tensor, Tensor],
    pairs: Pairs,
    heads: int,
    ahead: Edge,
    space: Workspace,
) -> None:
    """Add gradients to `sums` = (dq [tokens*h, Dk], dk [S,Dk], dv [S,Dv]), in place.

    q [tokens, h*Dk], grad [tokens, h*Dv] and minus [tokens, h, 2] of the stretch's queries; minus
    holds -log-sum-exp and -<grad, out>.
    """
    dq, dk, dv = sums
    d_k, d_v = k.shape[1], v.shape[1]
    partial = space.take("partial", pairs.n_pairs * heads, d_k)
    for run in pairs.runs:
        t, size = slice(run.first, run.last), (run.high - run.low) * heads
        queries = space.take("queries", run.high - run.low, q.shape[1])
        grads = space.take("grads", run.high - run.low, grad.shape[1])
        torch.index_select(q, 0, run.tokens, out=queries)
        torch.index_select(grad, 0, run.tokens, out=grads)
        queries, grads = queries.view(size, d_k), grads.view(size, d_v)
        lse, delta = minus.index_select(0, run.tokens).view(size, 2).unbind(1)
        p = space.take("scores", size, run.last - run.first)
        torch.addmm(lse[:, None], queries, k[t].T, out=p)
        recover(p)
        if run.diagonal:
            mine, keep = _inside(p, run, heads, ahead.keep)
            mine.mul_(keep)
        dv[t].addmm_(p.T, grads)
        ds = space.take("gradients", size, run.last - run.first)
        torch.addmm(delta[:, None], grads, v[t].T, out=ds)
        ds.mul_(p)
        dk[t].addmm_(ds.T, queries)
        torch.mm(ds, k[t], out=partial[run.low * heads : run.high * heads])
    dq.add_(embedding_bag(pairs.members, partial, mode="sum"))
