"""Forward and backward pass of each branch over its pieces, one batch element at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.attention.branches import split_dim
from nsa.attention.cpu.blocks import Pairs, backward_blocks, forward_blocks, pair_up
from nsa.attention.cpu.dense import Piece, Schedule, Workspace, backward_piece, forward_piece
from nsa.attention.selection import Picker
from nsa.attention.tracing import profile_range
from nsa.contract import CMP_RANGE, SCORES_RANGE


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
