"""The CPU path as one differentiable function of queries, keys, values and gates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nsa.attention.branches import Branches
from nsa.attention.compression import accumulate_dtype, compress
from nsa.attention.cpu.blocks import Pairs, backward_blocks
from nsa.attention.cpu.dense import Piece, Workspace, backward_piece
from nsa.attention.cpu.forward import Rows, attend_blocks, attend_compressed, attend_pieces
from nsa.attention.cpu.schedule import Schedule, heads_of, major, rows_of, schedule
from nsa.attention.ranges import block_map, build_ranges
from nsa.config import NSAConfig, Ranges
from nsa.ranges import profile_range


@dataclass(kw_only=True)
class Plan:
    """What the backward pass needs besides tensors."""

    cfg: NSAConfig
    cut: Schedule
    pairs: list[list[list[Pairs]]] = field(default_factory=list)  # [batch][group][stretch]


def _choose(blocks: Tensor, plan: Plan, version: Ranges) -> Tensor:
    """Block map bool [B,G,S-full,NB] of the queries that choose, by way of token ranges."""
    cfg, cut = plan.cfg, plan.cut
    ranges = build_ranges(blocks, cfg, version)[:, cut.full :]
    return block_map(ranges, cfg.n_blocks(cut.seq_len), cfg).transpose(1, 2)


def _forward(
    q: Tensor, keys: list[Tensor], values: list[Tensor], plan: Plan, version: Ranges
) -> tuple[list[Rows], Tensor]:
    """Results of the three branches, and the selected blocks [B,S,G,n_sel]."""
    cfg, cut, space = plan.cfg, plan.cut, Workspace(q)
    heads, batch = cfg.heads_per_group, range(q.shape[0])
    cmp, sel, win = (Rows.empty(q, v.shape[-1]) for v in values)
    picked = [
        attend_compressed(q[b], keys[0][b], values[0][b], cmp.of(b), cut, space) for b in batch
    ]
    blocks = torch.stack(picked)
    chosen = _choose(blocks, plan, version)
    with profile_range("nsa.sel.attend"):
        for b in batch:
            attend_pieces(q[b], keys[1][b], values[1][b], sel.of(b), cut.sel, heads, space)
            plan.pairs.append(
                attend_blocks(q[b], keys[1][b], values[1][b], sel.of(b), chosen[b], cut, space)
            )
    with profile_range("nsa.win"):
        for b in batch:
            attend_pieces(q[b], keys[2][b], values[2][b], win.of(b), cut.win, heads, space)
    return [cmp, sel, win], blocks


@dataclass(frozen=True, kw_only=True)
class _Grads:
    """One batch element's inputs and gradient sums of one branch, rows as in `Rows`."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    gate: Tensor
    minus_lse: Tensor
    minus_delta: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor

    def pieces(self, pieces: list[Piece], heads: int, space: Workspace) -> None:
        for piece in pieces:
            r = slice(piece.start * heads, piece.stop * heads)
            t = slice(piece.first, piece.last)
            backward_piece(
                self.q[:, r],
                self.k[:, t],
                self.v[:, t],
                self.grad[:, r] * self.gate[:, r],
                self.minus_lse[:, r],
                self.minus_delta[:, r],
                (self.dq[:, r], self.dk[:, t], self.dv[:, t]),
                piece,
                heads,
                space,
            )

    def blocks(self, pairs: list[list[Pairs]], heads: int, space: Workspace) -> None:
        for g, stretches in enumerate(pairs):
            for part in stretches:
                r = slice(part.start * heads, part.stop * heads)
                tokens = part.stop - part.start
                backward_blocks(
                    self.q[g, r].view(tokens, -1),
                    self.k[g],
                    self.v[g],
                    (self.grad[g, r] * self.gate[g, r]).view(tokens, -1),
                    self.minus_lse[g, r].view(tokens, -1),
                    self.minus_delta[g, r].view(tokens, -1),
                    (self.dq[g, r], self.dk[g], self.dv[g]),
                    part,
                    heads,
                    space,
                )


class _BatchedCPU(torch.autograd.Function):
    """Forward and backward over group-major rows; probabilities are recomputed, never stored."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k_cmp: Tensor,
        v_cmp: Tensor,
        k_sel: Tensor,
        v_sel: Tensor,
        k_win: Tensor,
        v_win: Tensor,
        gates: Tensor,
        cfg: NSAConfig,
        version: Ranges,
    ) -> tuple[Tensor, Tensor]:
        """Output [B,S,H,Dv] and blocks [B,S,G,n_sel]; k_cmp, v_cmp are compressed [B,N,G,D]."""
        plan = Plan(cfg=cfg, cut=schedule(cfg, q.shape[1], k_cmp.shape[1], q))
        rows = rows_of(q, cfg.n_kv_groups, cfg.d_k**-0.5)
        keys = [major(k) for k in (k_cmp, k_sel, k_win)]
        values = [major(v) for v in (v_cmp, v_sel, v_win)]
        results, blocks = _forward(rows, keys, values, plan, version)
        with profile_range("nsa.gate"):
            shares = rows_of(gates, cfg.n_kv_groups)
            out = results[0].out * shares[..., 0:1]
            for i in (1, 2):
                out.addcmul_(results[i].out, shares[..., i : i + 1])
            mixed = heads_of(out, cfg.heads_per_group)
        ctx.plan = plan
        outs, lses = [r.out for r in results], [r.lse for r in results]
        ctx.save_for_backward(rows, shares, *keys, *values, *outs, *lses)
        ctx.mark_non_differentiable(blocks)
        return mixed, blocks

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of q, the six keys and values, and the gates."""
        q, shares, *saved = ctx.saved_tensors
        keys, values, outs, lses = saved[:3], saved[3:6], saved[6:9], saved[9:12]
        plan: Plan = ctx.plan
        cfg, cut, space = plan.cfg, plan.cut, Workspace(q)
        heads, grad = cfg.heads_per_group, rows_of(grad_out, cfg.n_kv_groups)
        dq, d_gates = torch.zeros_like(q), torch.empty_like(shares)
        sums: list[Tensor] = []
        for i, pieces in enumerate((cut.cmp, cut.sel, cut.win)):
            gate = shares[..., i : i + 1]
            # <grad, out> is the gate's gradient, and times the gate the softmax's row term.
            d_gate = torch.sum(grad * outs[i], -1, keepdim=True)
            d_gates[..., i : i + 1] = d_gate
            minus_delta, minus_lse = d_gate.mul_(gate).neg_(), lses[i].neg()
            dk, dv = torch.zeros_like(keys[i]), torch.zeros_like(values[i])
            for b in range(q.shape[0]):
                work = _Grads(
                    q=q[b],
                    k=keys[i][b],
                    v=values[i][b],
                    grad=grad[b],
                    gate=gate[b],
                    minus_lse=minus_lse[b],
                    minus_delta=minus_delta[b],
                    dq=dq[b],
                    dk=dk[b],
                    dv=dv[b],
                )
                work.pieces(pieces, heads, space)
                if i == 1:
                    work.blocks(plan.pairs[b], heads, space)
            sums += [dk.transpose(1, 2), dv.transpose(1, 2)]
        dq = heads_of(dq.mul_(cfg.d_k**-0.5), heads)
        return dq, *sums, heads_of(d_gates, heads), None, None


def batched_cpu(x: Branches, cfg: NSAConfig, version: Ranges) -> tuple[Tensor, Tensor]:
    """Output [B,S,H,Dv] and the selected blocks [B,S,G,n_sel] on a CPU.

    Half types are computed in float32 throughout and rounded once, at the end.
    """
    wide = x.to(accumulate_dtype(x.q.dtype))
    k_cmp, v_cmp = compress(wide.k_cmp, cfg), compress(wide.v_cmp, cfg)
    rest = (wide.k_sel, wide.v_sel, wide.k_win, wide.v_win, wide.gates)
    out, blocks = _BatchedCPU.apply(wide.q, k_cmp, v_cmp, *rest, cfg, version)
    return out.to(x.q.dtype), blocks
