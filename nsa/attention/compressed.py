"""The compressed branch and the choice of blocks, by chunks of queries, for any device.

The probabilities choose the blocks, so the softmax is written out, in float32 whatever the
caller's types are. They are recomputed in the backward pass: nothing that has a compressed key for
each query is kept, which at long sequences would be most of the memory of a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nsa.attention.branches import chunks, split_dim
from nsa.attention.selection import Picker, full_float32
from nsa.attention.tracing import config_of, differentiate, operator, profile_range
from nsa.config import NSAConfig
from nsa.contract import CMP_RANGE, SCORES_RANGE

# The gradients of keys and values are sums over all queries: as one product, a small matrix made of
# very long rows, for which a library fills few of a GPU's processors (a fifth of an H100's step).
# So the rows are cut into pieces whose products are added: at most so many, of at least so many.
_PIECES, _LEAST_ROWS = 32, 256

Three = tuple[Tensor, Tensor, Tensor]


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


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """A call's chunks of queries [start, stop), positions [S], and last tokens of blocks [N]."""

    chunks: list[tuple[int, int]]
    positions: Tensor
    ends: Tensor

    @classmethod
    def of(cls, q: Tensor, keys: Tensor, cfg: NSAConfig) -> _Cut:
        """Of q [B,G,S,h,Dk] on keys [B*G,N,Dk]."""
        batch, _, seq_len, heads, _ = q.shape
        positions = torch.arange(seq_len, device=q.device)
        # A block is visible from its last token on; before the first one ends, none is.
        ends = torch.arange(cfg.l - 1, cfg.l - 1 + cfg.d * keys.shape[1], cfg.d, device=q.device)
        row = batch * q.shape[1] * heads * ends.numel() * keys.itemsize
        cuts = chunks(min(cfg.l - 1, seq_len), seq_len, row)
        return cls(chunks=cuts, positions=positions, ends=ends)

    def hidden(self, start: int, stop: int) -> Tensor:
        """Which blocks queries do not see: bool [stop - start, 1, N]."""
        return self.ends > self.positions[start:stop, None, None]


def _forward(
    q: Tensor, keys: Tensor, values: Tensor, cut: _Cut, cfg: NSAConfig
) -> tuple[Tensor, Tensor]:
    """Attend by chunks; each chunk's probabilities choose its blocks, then they are gone."""
    batch, groups, seq_len, heads, _ = q.shape
    out = values.new_zeros(keys.shape[0], seq_len * heads, values.shape[2])
    picker = Picker(cfg, cut.positions, batch * groups)
    with full_float32():
        for start, stop in cut.chunks:
            with profile_range(CMP_RANGE):
                rows = _rows(q, start, stop, keys.dtype)
                p = _probabilities(rows, keys, cut.hidden(start, stop), heads)
                torch.bmm(p, values, out=out[:, start * heads : stop * heads])
            first = max(start, picker.first)
            if first < stop:
                with profile_range(SCORES_RANGE):
                    of_heads = p.view(p.shape[0], stop - start, heads, -1)[:, first - start :]
                    picker.take(of_heads.sum(2), first)
    blocks = torch.cat(picker.picked, 1).view(batch, groups, seq_len, cfg.n_sel)
    return out.view(batch, groups, seq_len, heads, -1), blocks


def _backward(grad_out: Tensor, q: Tensor, keys: Tensor, values: Tensor, cut: _Cut) -> Three:
    """Gradients of q, keys and values, from the same probabilities again."""
    heads, kind = q.shape[3], keys.dtype
    dq = torch.zeros_like(q, dtype=kind, memory_format=torch.contiguous_format)
    dk = dv = None
    rows_of_dq = dq.view(keys.shape[0], -1, q.shape[4])
    with full_float32():
        for start, stop in cut.chunks:
            rows, grad = (_rows(x, start, stop, kind) for x in (q, grad_out))
            p = _probabilities(rows, keys, cut.hidden(start, stop), heads)
            dv = _add_product(dv, p, grad)
            dp = torch.bmm(grad, values.transpose(1, 2))
            ds = torch._softmax_backward_data(dp, p, -1, kind)
            dk = _add_product(dk, ds, rows)
            torch.bmm(ds, keys, out=rows_of_dq[:, start * heads : stop * heads])
    if dk is None or dv is None:
        # No query sees a block.
        dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
    return dq.to(q.dtype), dk, dv


class _Compressed(torch.autograd.Function):
    """q [B,G,S,h,Dk], scaled keys [B*G,N,Dk], values [B*G,N,Dv] to output and blocks."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, keys: Tensor, values: Tensor, cfg: NSAConfig
    ) -> tuple[Tensor, Tensor]:
        """Output [B,G,S,h,Dv], blocks [B,G,S,n_sel]."""
        ctx.cut = _Cut.of(q, keys, cfg)
        out, blocks = _forward(q, keys, values, ctx.cut, cfg)
        ctx.save_for_backward(q, keys, values)
        ctx.mark_non_differentiable(blocks)
        ctx.set_materialize_grads(False)  # no zeros in place of the blocks' gradient
        return out, blocks

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of q, keys and values."""
        q, keys, values = ctx.saved_tensors
        return *_backward(grad_out, q, keys, values, ctx.cut), None


def _fake(q: Tensor, _: Tensor, values: Tensor, *numbers: int) -> tuple[Tensor, Tensor]:
    out = values.new_empty(*q.shape[:4], values.shape[2])
    return out, q.new_empty(*q.shape[:3], numbers[-1], dtype=torch.int64)


def _config(q: Tensor, values: Tensor, l: int, d: int, l_sel: int, n_sel: int) -> NSAConfig:  # noqa: E741
    return config_of(q.transpose(1, 2), values, l=l, d=d, l_sel=l_sel, n_sel=n_sel)


@operator(_fake)
def choosing(
    q: Tensor, keys: Tensor, values: Tensor, l: int, d: int, l_sel: int, n_sel: int  # noqa: E741
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`_Compressed` for a compiler, which is not to see what chooses blocks, nor its precision."""
    cfg = _config(q, values, l, d, l_sel, n_sel)
    return _forward(q, keys, values, _Cut.of(q, keys, cfg), cfg)


@operator(lambda _, *inputs: tuple(x.new_empty(x.shape) for x in inputs[:3]))
def choosing_backward(
    grad: Tensor, q: Tensor, keys: Tensor, values: Tensor, l: int, d: int, l_sel: int, n_sel: int  # noqa: E741
) -> Three:  # fmt: skip
    """Gradients of q, keys and values from that of the output."""
    cut = _Cut.of(q, keys, _config(q, values, l, d, l_sel, n_sel))
    return _backward(grad, q, keys, values, cut)


differentiate(choosing, choosing_backward, results=0)


def attend_compressed(q: Tensor, k: Tensor, v: Tensor, cfg: NSAConfig) -> tuple[Tensor, Tensor]:
    """Output [B,G,S,h,Dv] and blocks [B,G,S,n_sel] of q [B,G,S,h,Dk] on k, v [B,G,N,D].

    k, v and the output are of the accumulation type; queries that see no block get exactly 0.
    """
    keys, values = (k * cfg.d_k**-0.5).flatten(0, 1), v.flatten(0, 1)
    if torch.compiler.is_compiling():
        return choosing(q, keys, values, cfg.l, cfg.d, cfg.l_sel, cfg.n_sel)
    return cast(
        "tuple[Tensor, Tensor]",
        _Compressed.apply(q, keys, values, cfg),  # type: ignore[no-untyped-call]
    )
