"""Batched prefill for CPUs: explicit matrix products on cache-sized pieces, own backward pass.

The fused attention kernels of a CPU reach about half of its matrix rate at these shapes, and know
no block sparsity. Here each piece is a plain product that runs at full rate, a group's query
heads are rows of one matrix (so keys are never expanded), and probabilities are recomputed in
the backward pass from the saved log-sum-exp instead of being stored, but of short sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nsa.attention.branches import Branches
from nsa.attention.cpu.branch import Branch, BranchGrads, Rows
from nsa.attention.cpu.pieces import (
    Pairs,
    Piece,
    Schedule,
    masked_piece,
    pair_stretches,
    schedule,
    workspace,
)
from nsa.attention.selection import (
    accumulate_dtype,
    block_map,
    build_ranges,
    compress,
    group_queries,
)
from nsa.attention.tracing import profile_range
from nsa.config import NSAConfig, Ranges
from nsa.contract import ATTEND_RANGE, GATE_RANGE, WIN_RANGE

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
    cfg, space, batch = cut.cfg, workspace(q.dtype), range(q.shape[0])
    blind = min(cfg.l - 1, cut.seq_len) * cfg.heads_per_group
    cmp = Rows.empty(q, cfg.d_v, blind, keep=cut.masked)
    sel, win = (Rows.empty(q, cfg.d_v, keep=cut.masked) for _ in range(2))
    results = [cmp, sel, win]

    def branch(i: int, b: int) -> Branch:
        rows = results[i].of(b)
        return Branch(q=q[b], k=keys[i][b], v=values[i][b], rows=rows, cut=cut, space=space)

    blocks = torch.stack([branch(0, b).choose() for b in batch])
    chosen = _chosen(blocks, cut, version)
    with profile_range(ATTEND_RANGE):
        for b, (pieces, pairs) in enumerate(chosen):
            work = branch(1, b)
            for piece in pieces:
                work.attend(piece)
            work.attend_blocks(pairs)
    with profile_range(WIN_RANGE):
        for b in batch:
            work = branch(2, b)
            for piece in cut.win:
                work.attend(piece)
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
                cut=cut,
                space=space,
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
        """Output [B,S,G,h,Dv] and blocks [B,S,G,n_sel] of q [B,G,S,h,Dk], gates [B,G,S,h,3], keys
        and values [B,G,T,D], compressed ones of their branch.
        """
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
