"""Batched prefill for CPUs: explicit matrix products on cache-sized pieces, own backward pass.

The fused attention kernels of a CPU reach about half of its matrix rate at these shapes, and know
no block sparsity. Here each piece is a plain product that runs at full rate, a group's query
heads are rows of one matrix (so keys are never expanded), and probabilities are recomputed in
the backward pass from the saved log-sum-exp instead of being stored, but of short sequences.

Exponentials of minus infinity, or of anything that underflows, take a path in the vector library
that is ten to a hundred times slower than the normal one. So where torch's softmax, which knows
minus infinity, does not take them, arguments are cut off where the result is far below rounding of
the row's sum (which is at least 1), and hidden keys are then multiplied by an exact 0.

Of a block of selected attention the queries that chose it are gathered, multiplied with its keys
and values at full matrix rate, and leave one partial result per pair; a weighted gather puts each
query's n_sel partial results together. Work is exactly that of the selected tokens; the only large
memory is one partial result per pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding_bag

from nsa.attention.branches import Branches, split_dim
from nsa.attention.cpu.pieces import (
    WORKSPACE,
    Pairs,
    Piece,
    Run,
    Schedule,
    masked_piece,
    pair_stretches,
    schedule,
)
from nsa.attention.selection import (
    Picker,
    accumulate_dtype,
    block_map,
    build_ranges,
    compress,
    group_queries,
)
from nsa.attention.tracing import profile_range
from nsa.config import NSAConfig, Ranges
from nsa.contract import ATTEND_RANGE, CMP_RANGE, GATE_RANGE, SCORES_RANGE, WIN_RANGE


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


def _inside(scores: Tensor, run: Run, heads: int, edge: Tensor) -> tuple[Tensor, Tensor]:
    """Scores [diagonal, heads, L] of the rows inside the block, and the edge's part for them."""
    rows = scores[: run.diagonal * heads].view(run.diagonal, heads, -1)
    return rows, edge[run.place : run.place + run.diagonal, :, : rows.shape[-1]]


@dataclass(frozen=True, kw_only=True)
class Branch:
    """One branch: q [B,G,S*h,Dk], k [B,G,T,Dk], v [B,G,T,Dv], out [B,G,S*h,Dv], lse [B,G,S*h,1].

    Keys are multiplied by 1/sqrt(d_k); out and lse have a row per query head. kept: probabilities
    of all pieces in order, batch element by batch element; None where they are computed again.
    What works on a branch, or on `BranchGrads`, works on one batch element, without B.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    kept: list[Tensor] | None
    cut: Schedule

    @staticmethod
    def of(q: Tensor, k: Tensor, v: Tensor, cut: Schedule, blind: int = 0) -> Branch:
        """Of q as rows, and keys as they came; the first `blind` rows see nothing: they are 0."""
        out, lse = q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(*q.shape[:-1], 1)
        out[..., :blind, :] = 0
        lse[..., :blind, :] = 0
        k, kept = (k * cut.scale).contiguous(), list[Tensor]() if cut.masked else None
        return Branch(q=q, k=k, v=v.contiguous(), out=out, lse=lse, kept=kept, cut=cut)

    def take(self, name: str, *shape: int) -> Tensor:
        """Scratch of the branch's type, of the thread that asks."""
        return WORKSPACE.take(name, self.q.dtype, *shape)

    def element(self, b: int) -> Branch:
        """One batch element."""
        tensors = {name: getattr(self, name)[b] for name in ("q", "k", "v", "out", "lse")}
        return replace(self, **tensors)

    def attend(self, piece: Piece) -> Tensor:
        """Fill the rows of a piece, each of which sees a key.

        Returns probabilities [G,M,L], which live in the workspace until its next use, or for as
        long as in `kept`, to which they are added.
        """
        heads = self.cut.cfg.heads_per_group
        r, t = piece.rows(heads), slice(piece.first, piece.last)
        q, k = self.q[:, r], self.k[:, t]
        groups, rows = q.shape[:2]
        scores = self.take("scores", groups, rows, k.shape[1])
        torch.bmm(q, k.transpose(1, 2), out=scores)
        piece.cover(scores, heads)
        top = torch.amax(scores, -1, keepdim=True, out=self.take("top", groups, rows, 1))
        if self.kept is None:
            p = torch.softmax(scores, -1, out=self.take("probabilities", *scores.shape))
        else:
            p = scores.softmax(-1)
            self.kept.append(p)
        torch.bmm(p, self.v[:, t], out=self.out[:, r])
        # The largest probability is 1 over the sum of exp(score - top).
        largest = torch.amax(p, -1, keepdim=True, out=self.take("total", groups, rows, 1))
        torch.sub(top, largest.log_(), out=self.lse[:, r])
        return p

    def choose(self) -> Tensor:
        """Fill the rows of the compressed branch; returns the blocks chosen [S,G,n_sel]."""
        heads = self.cut.cfg.heads_per_group
        picker = Picker(self.cut.cfg, torch.arange(self.cut.seq_len), self.q.shape[0])
        for piece in self.cut.cmp:
            with profile_range(CMP_RANGE):
                p = self.attend(piece)
            first = max(piece.start, picker.first)
            if first < piece.stop:
                with profile_range(SCORES_RANGE):
                    skip = (first - piece.start) * heads
                    summed = split_dim(p[:, skip:], 1, heads).sum(2)
                    picker.take(summed, first)
        return torch.cat(picker.picked, 1).transpose(0, 1)

    def attend_blocks(self, pairs: list[list[Pairs]]) -> None:
        """Fill the rows of queries that choose among blocks, by group and stretch."""
        heads = self.cut.cfg.heads_per_group
        for g, stretches in enumerate(pairs):
            for mine, (start, stop) in zip(stretches, self.cut.stretches, strict=True):
                r = slice(start * heads, stop * heads)
                self.out[g, r], self.lse[g, r] = self._meet(g, r, mine)

    def _meet(self, g: int, r: slice, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """Output [tokens*h, Dv] and log-sum-exp [tokens*h, 1] of a stretch of one group."""
        k, v, ahead = self.k[g], self.v[g], self.cut.ahead
        heads, d_k = self.cut.cfg.heads_per_group, k.shape[1]
        q = self.q[g, r].view(-1, heads * d_k)
        rows = pairs.n_pairs * heads
        partial = self.take("partial", rows, v.shape[1])
        top, total = self.take("top", rows, 1), self.take("total", rows, 1)
        for run in pairs.runs:
            part = slice(run.low * heads, run.high * heads)
            size = (run.high - run.low) * heads
            queries = self.take("queries", run.high - run.low, q.shape[1])
            torch.index_select(q, 0, run.tokens, out=queries)
            scores = self.take("scores", size, run.last - run.first)
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
        weight = weight.div_(whole)
        out = embedding_bag(pairs.members, partial, mode="sum", per_sample_weights=weight)
        return out, highest + whole.log()


@dataclass(frozen=True, kw_only=True)
class BranchGrads(Branch):
    """And the sums of its gradients.

    dq [G,S*h,Dk], dk [G,T,Dk], dv [G,T,Dv], grad [G,S,h,Dv] (any layout), gate and d_gate
    [G,S,h,1]. first: in `kept`, of this element.
    """

    grad: Tensor
    gate: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    d_gate: Tensor
    first: int

    def _gated(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Gated gradient [G,M,Dv] and minus [G,M,2] = (-lse, -<gated gradient, out>).

        <gradient, out> is the gate's own gradient, and is stored as such.
        """
        grad, gate = self.grad[:, start:stop], self.gate[:, start:stop]
        heads = grad.shape[2]
        r = slice(start * heads, stop * heads)
        scratch = self.take("grad", *grad.shape)
        out = self.out[:, r].view(grad.shape)
        d_gate = torch.mul(grad, out, out=scratch).sum(-1, keepdim=True)
        self.d_gate[:, start:stop] = d_gate
        delta = d_gate.mul_(gate).view(grad.shape[0], -1, 1)
        minus = torch.cat((self.lse[:, r], delta), -1).neg_()
        gated = torch.mul(grad, gate, out=scratch)
        return gated.view(grad.shape[0], -1, grad.shape[-1]), minus

    def pieces(self, pieces: tuple[Piece, ...]) -> None:
        """Add the dense pieces' gradients."""
        heads = self.cut.cfg.heads_per_group
        for number, piece in enumerate(pieces, self.first):
            r, t = piece.rows(heads), slice(piece.first, piece.last)
            grad, minus = self._gated(piece.start, piece.stop)
            q, k = self.q[:, r], self.k[:, t]
            shape = (*q.shape[:2], k.shape[1])
            if self.kept is None:
                p = self.take("scores", *shape)
                torch.baddbmm(minus[..., 0:1], q, k.transpose(1, 2), out=p)
                recover(p)
                piece.erase(p, heads)
            else:
                p = self.kept[number]
            self.dv[:, t].baddbmm_(p.transpose(1, 2), grad)
            ds = self.take("gradients", *shape)
            torch.baddbmm(minus[..., 1:2], grad, self.v[:, t].transpose(1, 2), out=ds)
            ds.mul_(p)
            self.dk[:, t].baddbmm_(ds.transpose(1, 2), q)
            self.dq[:, r].baddbmm_(ds, k)

    def blocks(self, pairs: list[list[Pairs]]) -> None:
        """Add the gradients of the queries that choose among blocks, by stretch and group."""
        heads = self.cut.cfg.heads_per_group
        for i, (start, stop) in enumerate(self.cut.stretches):
            r = slice(start * heads, stop * heads)
            grad, minus = self._gated(start, stop)
            for g, stretches in enumerate(pairs):
                rows = grad[g].view(stop - start, -1), minus[g].view(stop - start, heads, 2)
                self._give(g, r, *rows, stretches[i])

    def _give(self, g: int, r: slice, grad: Tensor, minus: Tensor, pairs: Pairs) -> None:
        """Those of one group's stretch, of grad [tokens, h*Dv] and minus [tokens, h, 2]."""
        k, v, ahead = self.k[g], self.v[g], self.cut.ahead
        dk, dv = self.dk[g], self.dv[g]
        heads, d_k, d_v = minus.shape[1], k.shape[1], v.shape[1]
        q = self.q[g, r].view(-1, heads * d_k)
        partial = self.take("partial", pairs.n_pairs * heads, d_k)
        for run in pairs.runs:
            t, size = slice(run.first, run.last), (run.high - run.low) * heads
            queries = self.take("queries", run.high - run.low, q.shape[1])
            grads = self.take("grads", run.high - run.low, grad.shape[1])
            torch.index_select(q, 0, run.tokens, out=queries)
            torch.index_select(grad, 0, run.tokens, out=grads)
            queries, grads = queries.view(size, d_k), grads.view(size, d_v)
            lse, delta = minus.index_select(0, run.tokens).view(size, 2).unbind(1)
            p = self.take("scores", size, run.last - run.first)
            torch.addmm(lse[:, None], queries, k[t].T, out=p)
            recover(p)
            if run.diagonal:
                mine, keep = _inside(p, run, heads, ahead.keep)
                mine.mul_(keep)
            dv[t].addmm_(p.T, grads)
            ds = self.take("gradients", size, run.last - run.first)
            torch.addmm(delta[:, None], grads, v[t].T, out=ds)
            ds.mul_(p)
            dk[t].addmm_(ds.T, queries)
            torch.mm(ds, k[t], out=partial[run.low * heads : run.high * heads])
        self.dq[g, r].add_(embedding_bag(pairs.members, partial, mode="sum"))


# Of the selected branch of one batch element: its dense pieces, and the pairs of the queries that
# choose, by group and stretch.
Chosen = tuple[tuple[Piece, ...], list[list[Pairs]]]


def _chosen(blocks: Tensor, cut: Schedule, version: Ranges) -> list[Chosen]:
    """Who reads what, of blocks [B,S,G,n_sel], by way of token ranges, by batch element."""
    ranges = build_ranges(blocks, cut.cfg, version)[:, 0 if cut.masked else cut.full :]
    chosen = block_map(ranges, cut.cfg.n_blocks(cut.seq_len), cut.cfg).transpose(1, 2)
    if cut.masked:
        return [((masked_piece(one, cut),), []) for one in chosen]
    return [(cut.sel, pair_stretches(one, cut)) for one in chosen]


def _forward(
    x: Sequence[Tensor], cut: Schedule, version: Ranges
) -> tuple[Tensor, Tensor, list[Branch], list[Chosen]]:
    """Output [B,S,G,h,Dv], blocks [B,S,G,n_sel], the branches, and what `_chosen` gives."""
    q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates = x
    q, batch = q.contiguous().flatten(2, 3), range(q.shape[0])
    blind = min(cut.cfg.l - 1, cut.seq_len) * cut.cfg.heads_per_group
    cmp = Branch.of(q, k_cmp, v_cmp, cut, blind)
    sel, win = Branch.of(q, k_sel, v_sel, cut), Branch.of(q, k_win, v_win, cut)
    blocks = torch.stack([cmp.element(b).choose() for b in batch])
    chosen = _chosen(blocks, cut, version)
    with profile_range(ATTEND_RANGE):
        for b, (pieces, pairs) in enumerate(chosen):
            work = sel.element(b)
            for piece in pieces:
                work.attend(piece)
            work.attend_blocks(pairs)
    with profile_range(WIN_RANGE):
        for b in batch:
            work = win.element(b)
            for piece in cut.win:
                work.attend(piece)
    branches = [cmp, sel, win]
    with profile_range(GATE_RANGE):
        mixed = _mix(branches, gates)
    return mixed, blocks, branches, chosen


def _backward(
    grad_out: Tensor, gates: Tensor, branches: list[Branch], chosen: list[Chosen]
) -> tuple[Tensor, ...]:
    """Gradients of q, the six keys and values, and the gates."""
    cut, grad = branches[0].cut, grad_out.transpose(1, 2)
    dq, d_gates = torch.zeros_like(branches[0].q), gates.new_zeros(gates.shape)
    sums: list[Tensor] = []
    for i, (branch, pieces) in enumerate(zip(branches, (cut.cmp, cut.sel, cut.win), strict=True)):
        dk, dv = torch.zeros_like(branch.k), torch.zeros_like(branch.v)
        for b in range(len(dq)):
            own = chosen[b][0] if i == 1 else pieces
            work = BranchGrads(
                **vars(branch.element(b)),
                grad=grad[b],
                gate=gates[b, ..., i : i + 1],
                dq=dq[b],
                dk=dk[b],
                dv=dv[b],
                d_gate=d_gates[b, ..., i : i + 1],
                first=b * len(own),
            )
            work.pieces(own)
            if i == 1:
                work.blocks(chosen[b][1])
        sums += [dk.mul_(cut.scale), dv]
    return dq.view(*gates.shape[:-1], -1), *sums, d_gates


def _mix(branches: list[Branch], gates: Tensor) -> Tensor:
    """Gated sum [B,S,G,h,Dv] of the branches' rows, gates [B,G,S,h,3]."""
    batch, groups, seq_len, heads, _ = gates.shape
    shape = (batch, groups, seq_len, heads, branches[0].out.shape[-1])
    mixed = gates.new_empty(batch, seq_len, groups, heads, shape[-1])
    view = mixed.transpose(1, 2)
    torch.mul(branches[0].out.view(shape), gates[..., 0:1], out=view)
    for i in (1, 2):
        view.addcmul_(branches[i].out.view(shape), gates[..., i : i + 1])
    return mixed


class _BatchedCPU(torch.autograd.Function):
    """Forward and backward by pieces."""

    @staticmethod
    def forward(ctx: Any, cfg: NSAConfig, version: Ranges, *x: Tensor) -> tuple[Tensor, Tensor]:
        """Output [B,S,G,h,Dv] and blocks [B,S,G,n_sel] of q [B,G,S,h,Dk], gates [B,G,S,h,3], keys
        and values [B,G,T,D], compressed ones of their branch.
        """
        q, k_cmp = x[:2]
        ctx.cut = schedule(cfg, q.shape[2], k_cmp.shape[2], q.dtype)
        mixed, blocks, branches, ctx.chosen = _forward(x, ctx.cut, version)
        ctx.kept = [branch.kept for branch in branches]
        laid = (tensor for one in branches for tensor in (one.k, one.v, one.out, one.lse))
        ctx.save_for_backward(x[-1], branches[0].q, *laid)
        ctx.mark_non_differentiable(blocks)
        return mixed, blocks

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of q, the six keys and values, and the gates."""
        gates, q, *saved = ctx.saved_tensors
        of_each = zip(*(saved[i::4] for i in range(4)), ctx.kept, strict=True)
        branches = [
            Branch(q=q, k=k, v=v, out=out, lse=lse, kept=kept, cut=ctx.cut)
            for k, v, out, lse, kept in of_each
        ]
        return None, None, *_backward(grad_out, gates, branches, ctx.chosen)


def batched_cpu(x: Branches, cfg: NSAConfig, version: Ranges) -> tuple[Tensor, Tensor]:
    """Output [B,S,H,Dv] and the selected blocks [B,S,G,n_sel] on a CPU.

    Half types are computed in float32 throughout and rounded once, at the end.
    """
    wide = x.to(accumulate_dtype(x.q.dtype))
    k_cmp, v_cmp = compress(wide.k_cmp, cfg), compress(wide.v_cmp, cfg)
    keys = (k_cmp, v_cmp, wide.k_sel, wide.v_sel, wide.k_win, wide.v_win)
    q, gates = group_queries(wide.q, cfg), group_queries(wide.gates, cfg)
    out, blocks = cast(
        "tuple[Tensor, Tensor]",
        _BatchedCPU.apply(cfg, version, q, *(t.transpose(1, 2) for t in keys), gates),  # type: ignore[no-untyped-call]
    )
    return out.flatten(2, 3).to(x.q.dtype), blocks
