"""Backward pass of one branch over its pieces and blocks, one batch element at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.attention.cpu.blocks import Pairs, backward_blocks
from nsa.attention.cpu.dense import Piece, Workspace, backward_piece
from nsa.attention.cpu.forward import Rows
from nsa.attention.cpu.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class BranchGrads:
    """Inputs and gradient sums of one branch and batch element.

    q, dq [G,S*h,Dk], k, dk [G,T,Dk], v, dv [G,T,Dv], grad [G,S,h,Dv] (any layout), gate and
    d_gate [G,S,h,1], rows as the forward pass left them.
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
        for piece in pieces:
            r = slice(piece.start * heads, piece.stop * heads)
            t = slice(piece.first, piece.last)
            grad, minus = self._gated(piece.start, piece.stop, space)
            sums = (self.dq[:, r], self.dk[:, t], self.dv[:, t])
            q, k, v = self.q[:, r], self.k[:, t], self.v[:, t]
            backward_piece(q, k, v, grad, minus, sums, piece, heads, space)

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
