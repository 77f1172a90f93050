"""The compressed branch and the choice of blocks, by chunks of queries, for any device.

The probabilities choose the blocks, so the softmax is written out, in float32 whatever the
caller's types are. They are recomputed in the backward pass: nothing that has a compressed key for
each query is kept, which at long sequences would be most of the memory of a step.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nsa.attention.branches import chunks, split_dim
from nsa.attention.compression import block_scores, full_float32
from nsa.attention.selection import everything_visible, top_blocks
from nsa.attention.tracing import profile_range
from nsa.config import NSAConfig
from nsa.contract import CMP_RANGE, SCORES_RANGE

# The gradients of keys and values are sums over all queries: as one product, a small matrix made of
# very long rows, for which a library fills few of a GPU's processors (a fifth of an H100's step).
# So the rows are cut into pieces whose products are added: at most so many, of at least so many.
_PIECES, _LEAST_ROWS = 32, 256


def _rows(x: Tensor, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """Queries [start, stop) of x [B,G,S,h,D] as rows of matrices [B*G, (stop-start)*h, D]."""
    part = x[:, :, start:stop].to(dtype, memory_format=torch.contiguous_format)
    return part.reshape(x.shape[0] * x.shape[1], -1, x.shape[4])


def _pieces(n_rows: int, device: torch.device) -> int:
    """Into how many equal pieces rows are cut for a sum over all of them."""
    if device.type == "cpu":
        return 1
    most = min(_PIECES, n_rows // _LEAST_ROWS)
    return next((n for n in range(most, 1, -1) if n_rows % n == 0), 1)


def _probabilities(rows: Tensor, keys: Tensor, hidden: Tensor, heads: int) -> Tensor:
    """Equation 8 for rows [M,C*h,Dk] on keys [M,N,Dk], hidden bool [C,1,N]: [M,C*h,N]."""
    logits = torch.bmm(rows, keys.transpose(1, 2))
    grid = logits.view(rows.shape[0], -1, heads, keys.shape[1])
    grid.masked_fill_(hidden, float("-inf"))
    return logits.softmax(-1)


def _add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Sum over rows of a [M,R,N] times b [M,R,D], added to total: [M,N,D]."""
    pieces = _pieces(a.shape[1], a.device)
    if pieces == 1:
        a = a.transpose(1, 2)
        return torch.bmm(a, b) if total is None else total.baddbmm_(a, b)
    first, second = (x.view(-1, x.shape[1] // pieces, x.shape[2]) for x in (a, b))
    products = split_dim(torch.bmm(first.transpose(1, 2), second), 0, pieces)
    return products.sum(1) if total is None else total.add_(products.sum(1))


class _Compressed(torch.autograd.Function):
    """q [B,G,S,h,Dk], k [B,G,N,Dk], v [B,G,N,Dv] to output [B,G,S,h,Dv], blocks [B,G,S,n_sel].

    k, v and the output are of the accumulation type.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cfg: NSAConfig) -> tuple[Tensor, Tensor]:
        """Attend by chunks; each chunk's probabilities choose its blocks, then they are gone."""
        batch, groups, seq_len, heads, _ = q.shape
        keys, values = (k * cfg.d_k**-0.5).flatten(0, 1), v.flatten(0, 1)
        positions = torch.arange(seq_len, device=q.device)
        # A block is visible from its last token on; before the first one ends, none is.
        ends = torch.arange(cfg.l - 1, cfg.l - 1 + cfg.d * k.shape[2], cfg.d, device=q.device)
        blind = min(cfg.l - 1, seq_len)
        out = values.new_zeros(*keys.shape[:1], seq_len * heads, v.shape[3])
        cuts = chunks(blind, seq_len, batch * cfg.n_heads * ends.numel() * keys.itemsize)
        picker = _Picker(cfg, positions, batch * groups, blind)
        for start, stop in cuts:
            with profile_range(CMP_RANGE):
                hidden = ends > positions[start:stop, None, None]
                p = _probabilities(_rows(q, start, stop, keys.dtype), keys, hidden, heads)
                torch.bmm(p, values, out=out[:, start * heads : stop * heads])
            with profile_range(SCORES_RANGE):
                picker.take(p.view(p.shape[0], stop - start, heads, -1), start)
        blocks = torch.cat(picker.picked, 1).view(batch, groups, seq_len, cfg.n_sel)
        ctx.cuts = cuts
        ctx.scale = cfg.d_k**-0.5
        ctx.save_for_backward(q, keys, values, positions, ends)
        ctx.mark_non_differentiable(blocks)
        ctx.set_materialize_grads(False)  # no zeros in place of the blocks' gradient
        return out.view(batch, groups, seq_len, heads, -1), blocks

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of q, k and v, from the same probabilities again."""
        q, keys, values, positions, ends = ctx.saved_tensors
        heads, kind = q.shape[3], keys.dtype
        dq = torch.zeros_like(q, dtype=kind, memory_format=torch.contiguous_format)
        dk = dv = None
        rows_of_dq = dq.view(keys.shape[0], -1, q.shape[4])
        with full_float32():
            for start, stop in ctx.cuts:
                rows, grad = (_rows(x, start, stop, kind) for x in (q, grad_out))
                hidden = ends > positions[start:stop, None, None]
                p = _probabilities(rows, keys, hidden, heads)
                dv = _add_product(dv, p, grad)
                dp = torch.bmm(grad, values.transpose(1, 2))
                ds = torch._softmax_backward_data(dp, p, -1, kind)
                dk = _add_product(dk, ds, rows)
                torch.bmm(ds, keys, out=rows_of_dq[:, start * heads : stop * heads])
        if dk is None or dv is None:
            # No query sees a block.
            dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
        dk = dk.mul_(ctx.scale)
        return dq.to(q.dtype), split_dim(dk, 0, q.shape[1]), split_dim(dv, 0, q.shape[1]), None


class _Picker:
    """Collects the blocks of all queries in `picked`: parts [B*G, tokens, n_sel]."""

    def __init__(self, cfg: NSAConfig, positions: Tensor, groups: int, blind: int) -> None:
        self.cfg, self.positions = cfg, positions
        self.n_blocks = cfg.n_blocks(positions.numel())
        # The first query that must choose.
        self.first = min(positions.numel(), cfg.n_sel * cfg.l_sel)
        early = everything_visible(0, self.first, cfg, positions.device)
        self.picked = [early.expand(groups, -1, -1)]
        if self.first < blind:
            nothing = positions.new_zeros(groups, blind - self.first, 1, 0, dtype=torch.float32)
            self.take(nothing, self.first)

    def take(self, p: Tensor, start: int) -> None:
        """Choose for queries from `start` on, with probabilities p [B*G,C,h,N]."""
        skip = max(0, self.first - start)
        if skip < p.shape[1]:
            scores = block_scores(p[:, skip:].sum(2), self.n_blocks, self.cfg)
            positions = self.positions[start + skip : start + p.shape[1]]
            self.picked.append(top_blocks(scores, positions, self.cfg, crowded=True))


def attend_compressed(q: Tensor, k: Tensor, v: Tensor, cfg: NSAConfig) -> tuple[Tensor, Tensor]:
    """Output [B,G,S,h,Dv] and blocks [B,G,S,n_sel] of q [B,G,S,h,Dk] on k, v [B,G,N,D].

    k, v and the output are of the accumulation type; queries that see no block get exactly 0.
    """
    return cast(
        "tuple[Tensor, Tensor]",
        _Compressed.apply(q, k, v, cfg),  # type: ignore[no-untyped-call]
    )
