"""The CPU path as one differentiable function of queries, keys, values and gates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nsa.attention.branches import Grouped
from nsa.attention.compression import accumulate_dtype, compress
from nsa.attention.cpu.blocks import Pairs
from nsa.attention.cpu.dense import Schedule, schedule, workspace
from nsa.attention.cpu.passes import (
    BranchGrads,
    Rows,
    attend_blocks,
    attend_compressed,
    attend_pieces,
)
from nsa.attention.selection import block_map, build_ranges
from nsa.attention.tracing import profile_range
from nsa.config import NSAConfig, Ranges
from nsa.contract import ATTEND_RANGE, GATE_RANGE, WIN_RANGE


@dataclass(kw_only=True)
class Plan:
    """What the backward pass needs besides tensors. pairs: by batch element, group, stretch."""

    cfg: NSAConfig
    cut: Schedule
    pairs: list[list[list[Pairs]]] = field(default_factory=list)

    @property
    def scale(self) -> float:
        """Of the scores; keys are multiplied by it once."""
        return float(self.cfg.d_k**-0.5)


def _choose(blocks: Tensor, plan: Plan, version: Ranges) -> Tensor:
    """Block map bool [B,G,S-full,NB] of the queries that choose, by way of token ranges."""
    cfg, cut = plan.cfg, plan.cut
    ranges = build_ranges(blocks, cfg, version)[:, cut.full :]
    return block_map(ranges, cfg.n_blocks(cut.seq_len), cfg).transpose(1, 2)


def _forward(
    q: Tensor, keys: list[Tensor], values: list[Tensor], plan: Plan, version: Ranges
) -> tuple[list[Rows], Tensor]:
    """Results of the three branches, and the selected blocks [B,S,G,n_sel]."""
    cfg, cut, space = plan.cfg, plan.cut, workspace(q.dtype)
    heads, batch = cfg.heads_per_group, range(q.shape[0])
    blind = min(cfg.l - 1, cut.seq_len) * heads
    cmp = Rows.empty(q, cfg.d_v, blind)
    sel, win = Rows.empty(q, cfg.d_v), Rows.empty(q, cfg.d_v)
    picked = [
        attend_compressed(q[b], keys[0][b], values[0][b], cmp.of(b), cut, space) for b in batch
    ]
    blocks = torch.stack(picked)
    chosen = _choose(blocks, plan, version)
    with profile_range(ATTEND_RANGE):
        for b in batch:
            attend_pieces(q[b], keys[1][b], values[1][b], sel.of(b), cut.sel, heads, space)
            plan.pairs.append(
                attend_blocks(q[b], keys[1][b], values[1][b], sel.of(b), chosen[b], cut, space)
            )
    with profile_range(WIN_RANGE):
        for b in batch:
            attend_pieces(q[b], keys[2][b], values[2][b], win.of(b), cut.win, heads, space)
    return [cmp, sel, win], blocks


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
    """Forward and backward by pieces; probabilities are recomputed, never stored."""

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
        """Output [B,S,G,h,Dv] and blocks [B,S,G,n_sel] of `Grouped` tensors, compressed ones."""
        plan = Plan(cfg=cfg, cut=schedule(cfg, q.shape[2], k_cmp.shape[2], q.dtype))
        rows = q.contiguous().flatten(2, 3)
        keys = [(k * plan.scale).contiguous() for k in (k_cmp, k_sel, k_win)]
        values = [v.contiguous() for v in (v_cmp, v_sel, v_win)]
        results, blocks = _forward(rows, keys, values, plan, version)
        with profile_range(GATE_RANGE):
            mixed = _mix(results, gates)
        ctx.plan = plan
        outs, lses = [r.out for r in results], [r.lse for r in results]
        ctx.save_for_backward(rows, gates, *keys, *values, *outs, *lses)
        ctx.mark_non_differentiable(blocks)
        return mixed, blocks

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of q, the six keys and values, and the gates."""
        q, gates, *saved = ctx.saved_tensors
        keys, values, outs, lses = saved[:3], saved[3:6], saved[6:9], saved[9:12]
        plan: Plan = ctx.plan
        cut, space, grad = plan.cut, workspace(q.dtype), grad_out.transpose(1, 2)
        dq, d_gates = torch.zeros_like(q), torch.zeros_like(gates)
        sums: list[Tensor] = []
        for i, pieces in enumerate((cut.cmp, cut.sel, cut.win)):
            dk, dv = torch.zeros_like(keys[i]), torch.zeros_like(values[i])
            for b in range(q.shape[0]):
                work = BranchGrads(
                    q=q[b],
                    k=keys[i][b],
                    v=values[i][b],
                    grad=grad[b],
                    gate=gates[b, ..., i : i + 1],
                    rows=Rows(out=outs[i][b], lse=lses[i][b]),
                    dq=dq[b],
                    dk=dk[b],
                    dv=dv[b],
                    d_gate=d_gates[b, ..., i : i + 1],
                )
                work.pieces(pieces, space)
                if i == 1:
                    work.blocks(plan.pairs[b], cut, space)
            sums += [dk.mul_(plan.scale), dv]
        return dq.view(*gates.shape[:-1], -1), *sums, d_gates, None, None


def batched_cpu(x: Grouped, cfg: NSAConfig, version: Ranges) -> tuple[Tensor, Tensor]:
    """Output [B,S,H,Dv] and the selected blocks [B,S,G,n_sel] on a CPU.

    Half types are computed in float32 throughout and rounded once, at the end. x is cheapest
    when it is contiguous, as the layer makes it; anything else is copied.
    """
    wide = x.to(accumulate_dtype(x.q.dtype))
    k_cmp, v_cmp = (
        compress(t.transpose(1, 2), cfg).transpose(1, 2) for t in (wide.k_cmp, wide.v_cmp)
    )
    rest = (wide.k_sel, wide.v_sel, wide.k_win, wide.v_win, wide.gates)
    out, blocks = cast(
        "tuple[Tensor, Tensor]",
        _BatchedCPU.apply(wide.q, k_cmp, v_cmp, *rest, cfg, version),  # type: ignore[no-untyped-call]
    )
    return out.flatten(2, 3).to(x.q.dtype), blocks
