"""Batched prefill for CPUs: explicit matrix products on cache-sized pieces, own backward pass.

The fused attention kernels of a CPU reach about half of its matrix rate at these shapes, and know
no block sparsity. Here each piece is a plain product that runs at full rate, a group's query
heads are rows of one matrix (so keys are never expanded), and probabilities are recomputed in
the backward pass from the saved log-sum-exp instead of being stored, but of short sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nsa.attention.branches import Grouped, split_dim
from nsa.attention.cpu.blocks import Pairs, backward_blocks, forward_blocks, pair_up
from nsa.attention.cpu.dense import (
    Piece,
    Schedule,
    Workspace,
    backward_piece,
    forward_piece,
    masked_piece,
    schedule,
    workspace,
)
from nsa.attention.selection import Picker, accumulate_dtype, block_map, build_ranges, compress
from nsa.attention.tracing import profile_range
from nsa.config import NSAConfig, Ranges
from nsa.contract import ATTEND_RANGE, CMP_RANGE, GATE_RANGE, SCORES_RANGE, WIN_RANGE

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
) -> tuple[Tensor, Tensor, list[Tensor], list[Rows], list[Chosen]]:
    """Output [B,S,G,h,Dv], blocks [B,S,G,n_sel], what is kept of x (queries as rows, keys times
    the scale, values), the branches' results, and what `_chosen` gives."""
    q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, _ = x
    keys = [(k * cut.scale).contiguous() for k in (k_cmp, k_sel, k_win)]
    values = [v.contiguous() for v in (v_cmp, v_sel, v_win)]
    q = q.contiguous().flatten(2, 3)
    cfg, space = cut.cfg, workspace(q.dtype)
    heads, batch = cfg.heads_per_group, range(q.shape[0])
    blind = min(cfg.l - 1, cut.seq_len) * heads
    cmp = Rows.empty(q, cfg.d_v, blind, keep=cut.masked)
    sel, win = (Rows.empty(q, cfg.d_v, keep=cut.masked) for _ in range(2))
    picked = [
        attend_compressed(q[b], keys[0][b], values[0][b], cmp.of(b), cut, space) for b in batch
    ]
    blocks = torch.stack(picked)
    chosen = _chosen(blocks, cut, version)
    with profile_range(ATTEND_RANGE):
        for b, (pieces, pairs) in enumerate(chosen):
            attend_pieces(q[b], keys[1][b], values[1][b], sel.of(b), pieces, heads, space)
            attend_blocks(q[b], keys[1][b], values[1][b], sel.of(b), pairs, cut, space)
    with profile_range(WIN_RANGE):
        for b in batch:
            attend_pieces(q[b], keys[2][b], values[2][b], win.of(b), cut.win, heads, space)
    results = [cmp, sel, win]
    with profile_range(GATE_RANGE):
        mixed = _mix(results, x[-1])
    return mixed, blocks, [q, *keys, *values], results, chosen


def _backward(
    grad_out: Tensor,
    gates: Tensor,
    laid: Sequence[Tensor],
    results: list[Rows],
    chosen: list[Chosen],
    cut: Schedule,
) -> tuple[Tensor, ...]:
    """Gradients of q, the six keys and values, and the gates."""
    q, *rest = laid
    keys, values = rest[:3], rest[3:]
    space, grad = workspace(q.dtype), grad_out.transpose(1, 2)
    dq, d_gates = torch.zeros_like(q), gates.new_zeros(gates.shape)
    sums: list[Tensor] = []
    for i, pieces in enumerate((cut.cmp, cut.sel, cut.win)):
        dk, dv = torch.zeros_like(keys[i]), torch.zeros_like(values[i])
        for b in range(q.shape[0]):
            own = chosen[b][0] if i == 1 else pieces
            work = BranchGrads(
                q=q[b],
                k=keys[i][b],
                v=values[i][b],
                grad=grad[b],
                gate=gates[b, ..., i : i + 1],
                rows=results[i].of(b),
                dq=dq[b],
                dk=dk[b],
                dv=dv[b],
                d_gate=d_gates[b, ..., i : i + 1],
                first=b * len(own),
            )
            work.pieces(own, space)
            if i == 1:
                work.blocks(chosen[b][1], cut, space)
        sums += [dk.mul_(cut.scale), dv]
    return dq.view(*gates.shape[:-1], -1), *sums, d_gates


def _mix(results: list[Rows], gates: Tensor) -> Tensor:
    """Gated sum [B,S,G,h,Dv] of the branches' rows, gates [B,G,S,h,3]."""
    batch, groups, seq_len, heads, _ = gates.shape
    shape = (batch, groups, seq_len, heads, results[0].out.shape[-1])
    mixed = gates.new_empty(batch, seq_len, groups, heads, shape[-1])
    view = mixed.transpose(1, 2)
    torch.mul(results[0].out.view(shape), gates[..., 0:1], out=view)
    for i in (1, 2):
        view.addcmul_(results[i].out.view(shape), gates[..., i : i + 1])
    return mixed


class _BatchedCPU(torch.autograd.Function):
    """Forward and backward by pieces."""

    @staticmethod
    def forward(ctx: Any, cfg: NSAConfig, version: Ranges, *x: Tensor) -> tuple[Tensor, Tensor]:
        """Output [B,S,G,h,Dv] and blocks [B,S,G,n_sel] of `Grouped` tensors, compressed ones."""
        q, k_cmp = x[:2]
        ctx.cut = schedule(cfg, q.shape[2], k_cmp.shape[2], q.dtype)
        mixed, blocks, laid, results, ctx.chosen = _forward(x, ctx.cut, version)
        ctx.kept = [rows.kept for rows in results]
        numbers = (*(rows.out for rows in results), *(rows.lse for rows in results))
        ctx.save_for_backward(x[-1], *laid, *numbers)
        ctx.mark_non_differentiable(blocks)
        return mixed, blocks

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of q, the six keys and values, and the gates."""
        gates, *saved = ctx.saved_tensors
        of_rows = zip(saved[7:10], saved[10:], ctx.kept, strict=True)
        rows = [Rows(out=out, lse=lse, kept=kept) for out, lse, kept in of_rows]
        return None, None, *_backward(grad_out, gates, saved[:7], rows, ctx.chosen, ctx.cut)


def batched_cpu(x: Grouped, cfg: NSAConfig, version: Ranges) -> tuple[Tensor, Tensor]:
    """Output [B,S,H,Dv] and the selected blocks [B,S,G,n_sel] on a CPU.

    Half types are computed in float32 throughout and rounded once, at the end. x is cheapest
    when it is contiguous, as the layer makes it; anything else is copied.
    """
    wide = x.to(accumulate_dtype(x.q.dtype))
    k_cmp, v_cmp = (
        compress(t.transpose(1, 2), cfg).transpose(1, 2) for t in (wide.k_cmp, wide.v_cmp)
    )
    given = (wide.q, k_cmp, v_cmp, wide.k_sel, wide.v_sel, wide.k_win, wide.v_win, wide.gates)
    out, blocks = cast(
        "tuple[Tensor, Tensor]",
        _BatchedCPU.apply(cfg, version, *given),  # type: ignore[no-untyped-call]
    )
    return out.flatten(2, 3).to(x.q.dtype), blocks


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Results of a branch, a row per query head: out [...,G,S*h,Dv], lse [...,G,S*h,1].

    Rows that no piece reaches see nothing: they are set to 0 at the start. kept: probabilities of
    all pieces in order, batch element by batch element; None where they are computed again.
    """

    out: Tensor
    lse: Tensor
    kept: list[Tensor] | None = None

    @staticmethod
    def empty(q: Tensor, d_v: int, blind: int = 0, *, keep: bool = False) -> Rows:
        """Results for queries q [...,S*h,Dk]; the first `blind` rows are 0, the rest not set."""
        out, lse = q.new_empty(*q.shape[:-1], d_v), q.new_empty(*q.shape[:-1], 1)
        rows = Rows(out=out, lse=lse, kept=[] if keep else None)
        rows.out[..., :blind, :] = 0
        rows.lse[..., :blind, :] = 0
        return rows

    def of(self, b: int) -> Rows:
        """The rows of one batch element."""
        return Rows(out=self.out[b], lse=self.lse[b], kept=self.kept)


def _piece(
    q: Tensor, k: Tensor, v: Tensor, rows: Rows, piece: Piece, heads: int, space: Workspace
) -> Tensor:
    r = slice(piece.start * heads, piece.stop * heads)
    t = slice(piece.first, piece.last)
    results = (rows.out[:, r], rows.lse[:, r])
    return forward_piece(q[:, r], k[:, t], v[:, t], results, piece, heads, space, rows.kept)


def attend_pieces(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Rows,
    pieces: tuple[Piece, ...],
    heads: int,
    space: Workspace,
) -> None:
    """Fill `rows` with the pieces' results for q [G,S*h,Dk], k, v [G,T,D]."""
    for piece in pieces:
        _piece(q, k, v, rows, piece, heads, space)


def attend_compressed(
    q: Tensor, k: Tensor, v: Tensor, rows: Rows, cut: Schedule, space: Workspace
) -> Tensor:
    """Fill `rows` with the compressed branch's results; returns the blocks chosen [S,G,n_sel]."""
    heads = cut.cfg.heads_per_group
    picker = Picker(cut.cfg, torch.arange(cut.seq_len), q.shape[0])
    for piece in cut.cmp:
        with profile_range(CMP_RANGE):
            p = _piece(q, k, v, rows, piece, heads, space)
        first = max(piece.start, picker.first)
        if first < piece.stop:
            with profile_range(SCORES_RANGE):
                skip = (first - piece.start) * heads
                summed = split_dim(p[:, skip:], 1, heads).sum(2)
                picker.take(summed, first)
    return torch.cat(picker.picked, 1).transpose(0, 1)


def pair_stretches(chosen: Tensor, cut: Schedule) -> list[list[Pairs]]:
    """Who meets whom, by group and stretch, from chosen bool [G,S-full,NB] of one batch element."""
    cfg, full = cut.cfg, cut.full
    return [
        [
            pair_up(
                mine[start - full : stop - full],
                start,
                cut.seq_len,
                cfg.l_sel,
                cfg.heads_per_group,
            )
            for start, stop in cut.stretches
        ]
        for mine in chosen
    ]


def attend_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Rows,
    pairs: list[list[Pairs]],
    cut: Schedule,
    space: Workspace,
) -> None:
    """Fill the rows of queries that choose among blocks, from `pair_stretches`."""
    heads = cut.cfg.heads_per_group
    for g, stretches in enumerate(pairs):
        for one, (start, stop) in zip(stretches, cut.stretches, strict=True):
            r = slice(start * heads, stop * heads)
            queries = q[g, r].view(stop - start, -1)
            rows.out[g, r], rows.lse[g, r] = forward_blocks(
                queries, k[g], v[g], one, heads, cut.ahead, space
            )


@dataclass(frozen=True, kw_only=True)
class BranchGrads:
    """Inputs and gradient sums of one branch and batch element.

    q, dq [G,S*h,Dk], k, dk [G,T,Dk], v, dv [G,T,Dv], grad [G,S,h,Dv] (any layout), gate and
    d_gate [G,S,h,1], rows as the forward pass left them. first: in `rows.kept`, of this element.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    gate: Tensor
    rows: Rows
    dq: Tensor
    dk: Tensor
    dv: Tensor
    d_gate: Tensor
    first: int

    def _gated(self, start: int, stop: int, space: Workspace) -> tuple[Tensor, Tensor]:
        """Gated gradient [G,M,Dv] and minus [G,M,2] = (-lse, -<gated gradient, out>).

        <gradient, out> is the gate's own gradient, and is stored as such.
        """
        grad, gate = self.grad[:, start:stop], self.gate[:, start:stop]
        heads = grad.shape[2]
        r = slice(start * heads, stop * heads)
        scratch = space.take("grad", *grad.shape)
        out = self.rows.out[:, r].view(grad.shape)
        d_gate = torch.mul(grad, out, out=scratch).sum(-1, keepdim=True)
        self.d_gate[:, start:stop] = d_gate
        delta = d_gate.mul_(gate).view(grad.shape[0], -1, 1)
        minus = torch.cat((self.rows.lse[:, r], delta), -1).neg_()
        gated = torch.mul(grad, gate, out=scratch)
        return gated.view(grad.shape[0], -1, grad.shape[-1]), minus

    def pieces(self, pieces: tuple[Piece, ...], space: Workspace) -> None:
        """Add the dense pieces' gradients."""
        heads = self.grad.shape[2]
        for number, piece in enumerate(pieces, self.first):
            r = slice(piece.start * heads, piece.stop * heads)
            t = slice(piece.first, piece.last)
            grad, minus = self._gated(piece.start, piece.stop, space)
            sums = (self.dq[:, r], self.dk[:, t], self.dv[:, t])
            q, k, v = self.q[:, r], self.k[:, t], self.v[:, t]
            p = None if self.rows.kept is None else self.rows.kept[number]
            backward_piece(q, k, v, grad, minus, sums, piece, heads, space, p)

    def blocks(self, pairs: list[list[Pairs]], cut: Schedule, space: Workspace) -> None:
        """Add the gradients of the queries that choose among blocks, by stretch and group."""
        heads = self.grad.shape[2]
        for i, (start, stop) in enumerate(cut.stretches):
            r, tokens = slice(start * heads, stop * heads), stop - start
            grad, minus = self._gated(start, stop, space)
            for g, stretches in enumerate(pairs):
                backward_blocks(
                    self.q[g, r].view(tokens, -1),
                    self.k[g],
                    self.v[g],
                    grad[g].view(tokens, -1),
                    minus[g].view(tokens, heads, 2),
                    (self.dq[g, r], self.dk[g], self.dv[g]),
                    stretches[i],
                    heads,
                    cut.ahead,
                    space,
                )
