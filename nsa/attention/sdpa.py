"""Batched prefill on any device, with few and large operators.

The selected branch is one masked scaled_dot_product_attention, the window another one over
stretches of queries, the compressed branch an explicit softmax. Or this package's Triton kernels
(`nsa.attention.triton`) run all of it. Where all queries' masks exceed the
budget of bytes, queries are cut into chunks whose masks are built again in the backward pass, so
that nothing of size S x S is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import pad, scaled_dot_product_attention

from nsa.attention.branches import Branches, chunks, split_dim
from nsa.attention.selection import (
    Picker,
    block_bits,
    block_map,
    build_ranges,
    compress,
    full_float32,
)
from nsa.attention.tracing import config_of, differentiate, operator, profile_range, told
from nsa.attention.triton import operators as by_triton
from nsa.config import NSAConfig, Way
from nsa.contract import (
    ATTEND_RANGE,
    CMP_RANGE,
    GATE_RANGE,
    SCORES_RANGE,
    SELECTION_RANGES,
    WIN_RANGE,
)


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, way: Way) -> Tensor:
    """SDPA of q [M,h,C,Dk], by hand where fused kernels are switched off.

    Without a bias it is causal from position 0.
    """
    scale: float = q.shape[-1] ** -0.5
    if way.use_flash:
        causal = bias is None
        return scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=causal, scale=scale)
    if bias is None:
        bias = q.new_full((q.shape[2], k.shape[2]), float("-inf")).triu_(1)
    logits = (q @ k.transpose(-1, -2)).float() if q.dtype.itemsize < 4 else q @ k.transpose(-1, -2)
    return (logits * scale + bias).softmax(-1).to(v.dtype) @ v


def _by_group(q: Tensor) -> Tensor:
    """Queries [B,S,G,h,D] as [B*G,h,S,D]: a group is an element of the batch, with one mask."""
    return q.permute(0, 2, 3, 1, 4).flatten(0, 1)


def _by_token(out: Tensor, q: Tensor) -> Tensor:
    """An output [B*G,h,S,Dv] as [B,S,G,h,Dv], like the queries q."""
    return split_dim(out, 0, q.shape[2]).permute(0, 3, 1, 2, 4)


def _cut(x: Tensor, dim: int, start: int, stop: int) -> Tensor:
    """Part of a dimension; the whole of it without an operator in the backward pass."""
    return x if stop - start == x.shape[dim] else x.narrow(dim, start, stop - start)


def _widen(x: Tensor, cfg: NSAConfig) -> Tensor:
    """Keys or values [B,T,G,D] as [B*G,h,T,D]: kernels that take masks know no shared heads."""
    wide = x.transpose(1, 2)[:, :, None].expand(-1, -1, cfg.heads_per_group, -1, -1)
    return wide.flatten(0, 1)


def _causal(q: Tensor, k: Tensor, v: Tensor, cfg: NSAConfig, way: Way) -> Tensor:
    """Causal attention [B,S,G,h,Dv] of q [B,S,G,h,Dk] on all of k, v [B,S,G,D]."""
    return _by_token(_attend(_by_group(q), _widen(k, cfg), _widen(v, cfg), None, way), q)


def _selected_bias(chosen: Tensor, start: int, stop: int, cfg: NSAConfig) -> Tensor:
    """Bias [M,1,stop-start,stop] of queries [start, stop): 0 or minus infinity.

    chosen [M,stop-start,NB] holds the same for whole blocks.
    """
    width = cfg.n_blocks(stop)
    key = torch.arange(width * cfg.l_sel, device=chosen.device).view(width, cfg.l_sel)
    ahead = key > torch.arange(start, stop, device=chosen.device)[:, None, None]
    bias = chosen[..., :width, None].masked_fill(ahead, float("-inf"))
    return bias.flatten(-2)[:, None, :, :stop]


@contextmanager
def _made_again(bias: Tensor, make: Callable[[], Tensor]) -> Iterator[None]:
    """Do not keep `bias` for the backward pass of what runs inside: make it a second time there."""
    mine = bias.untyped_storage()._cdata

    def pack(x: Tensor) -> Tensor | torch.Size:
        # A result that is kept with its history would hold itself, until garbage is collected.
        return x.shape if x.untyped_storage()._cdata == mine else x.detach()

    def unpack(kept: Tensor | torch.Size) -> Tensor:
        return kept if isinstance(kept, Tensor) else make().expand(kept)

    with saved_tensors_hooks(pack, unpack):
        yield


def _pooled(x: Branches, cfg: NSAConfig) -> tuple[Tensor, Tensor]:
    """Compressed keys and values [B,N,G,D], in at least float32."""
    if cfg.phi == "mlp":
        return compress(x.k_cmp, cfg), compress(x.v_cmp, cfg)
    # Both are pooled alike: together that is half of the operators.
    pooled = compress(torch.cat((x.k_cmp, x.v_cmp), -1), cfg)
    k, v = pooled.split_with_sizes((cfg.d_k, cfg.d_v), -1)
    return k, v


def _by_kernels(q: Tensor, x: Branches, cfg: NSAConfig, way: Way) -> tuple[Tensor, Tensor]:
    """Output [B,S,H,Dv] and blocks [B,S,G,n_sel] of q [B,S,G,h,Dk], all branches by ours."""
    # What `core` differentiates for all of them.
    seen, shape, version = q.detach(), told(cfg), way.selection_ranges
    with profile_range(WIN_RANGE):
        win, win_lse, terms, values = by_triton.window_and_terms(
            seen, x.k_win.detach(), x.v_win.detach(), x.k_cmp.detach(), x.v_cmp.detach(), shape
        )
    with profile_range(CMP_RANGE):
        cmp, cmp_lse, lse = by_triton.compressed(seen, terms, values, shape)
    # v2's ranges are made with the choice, v1's by loops from the blocks.
    of_ranges = profile_range(SELECTION_RANGES[version]) if version == "v2" else nullcontext()
    with profile_range(SCORES_RANGE), of_ranges:
        blocks, bits = by_triton.top_blocks(seen, terms, lse, shape)
    if version == "v1":
        bits = block_bits(build_ranges(blocks, cfg, version), cfg)
    with profile_range(GATE_RANGE), profile_range(ATTEND_RANGE):
        out, _, _ = by_triton.core(
            q, x.k_cmp, x.v_cmp, x.k_sel, x.v_sel, x.k_win, x.v_win, x.gates, bits, terms, values,
            cmp, cmp_lse, win, win_lse, shape,
        )  # fmt: skip
    return out, blocks


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


def _fake(q: Tensor, _: Tensor, values: Tensor, cfg: str) -> tuple[Tensor, Tensor]:
    out = values.new_empty(*q.shape[:4], values.shape[2])
    return out, q.new_empty(*q.shape[:3], config_of(cfg).n_sel, dtype=torch.int64)


@operator(_fake)
def choosing(q: Tensor, keys: Tensor, values: Tensor, cfg: str) -> tuple[Tensor, Tensor]:
    """Output [B,G,S,h,Dv] and blocks [B,G,S,n_sel] of q [B,G,S,h,Dk], scaled keys [B*G,N,Dk] and
    values [B*G,N,Dv]. A compiler is not to see what chooses blocks, nor its precision.
    """
    shape = config_of(cfg)
    return _forward(q, keys, values, _Cut.of(q, keys, shape), shape)


@operator(lambda _, *inputs: tuple(x.new_empty(x.shape) for x in inputs[:3]))
def choosing_backward(grad: Tensor, q: Tensor, keys: Tensor, values: Tensor, cfg: str) -> Three:
    """Gradients of q, keys and values from that of the output."""
    return _backward(grad, q, keys, values, _Cut.of(q, keys, config_of(cfg)))


differentiate(choosing, choosing_backward, results=0)


def _compressed(q: Tensor, x: Branches, cfg: NSAConfig) -> tuple[Tensor, Tensor]:
    """Compressed branch [B,S,G,h,Dv] of q [B,S,G,h,Dk]; blocks [B,S,G,n_sel].

    The branch is of the accumulation type; queries that see no block get exactly 0.
    """
    q, k, v = (t.transpose(1, 2) for t in (q, *_pooled(x, cfg)))
    keys, values = (k * cfg.d_k**-0.5).flatten(0, 1), v.flatten(0, 1)
    out, blocks = choosing(q, keys, values, told(cfg))
    return out.transpose(1, 2), blocks.transpose(1, 2).contiguous()


def _selected(q: Tensor, x: Branches, blocks: Tensor, cfg: NSAConfig, way: Way) -> Tensor:
    """Selected branch [B,S,G,h,Dv] of q [B,S,G,h,Dk]."""
    seq_len = q.shape[1]
    ranges = build_ranges(blocks, cfg, way.selection_ranges)
    with profile_range(ATTEND_RANGE):
        if seq_len <= cfg.n_sel * cfg.l_sel:
            # Everything visible is selected.
            return _causal(q, x.k_sel, x.v_sel, cfg, way)
        whole = block_map(ranges, cfg.n_blocks(seq_len), cfg).transpose(1, 2).flatten(0, 1)
        # What is added to scores: ln 1 = 0 and ln 0 = minus infinity, exactly.
        chosen = whole.to(q.dtype).log_()
        rows, k, v = _by_group(q), _widen(x.k_sel, cfg), _widen(x.v_sel, cfg)
        parts = []
        for start, stop in chunks(0, seq_len, rows.shape[0] * seq_len * q.itemsize):
            make = partial(_selected_bias, _cut(chosen, 1, start, stop), start, stop, cfg)
            bias = make()
            # A compiler weighs itself what to keep and what to make again.
            with nullcontext() if torch.compiler.is_compiling() else _made_again(bias, make):
                part = _cut(rows, 2, start, stop)
                seen = _cut(k, 2, 0, stop), _cut(v, 2, 0, stop)
                parts.append(_attend(part, *seen, bias, way))
        out = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
    return _by_token(out, q)


def _band(count: int, w: int, q: Tensor) -> Tensor:
    """Bias [count,1,w,2*w] of `count` stretches of w queries, each on its keys and the w before.

    Query i of a stretch sees keys i + 1 .. i + w of those 2*w; before the first stretch is nothing.
    """
    hidden = q.new_full((count, w, 2 * w), float("-inf"))
    bias = hidden.tril().add_(hidden.triu_(w + 1))
    bias[0, :, :w] = float("-inf")
    return bias[:, None]


def _masked_window(q: Tensor, k: Tensor, v: Tensor, cfg: NSAConfig, way: Way) -> Tensor:
    """Window branch [B,S,G,h,Dv] of q [B,S,G,h,Dk] on k, v [B,S,G,D], for S > w, by masks."""
    batch, seq_len, groups, heads = q.shape[:4]
    w = cfg.w
    count = -(-seq_len // w)
    rest = count * w - seq_len
    rows = pad(q, (0, 0, 0, 0, 0, 0, 0, rest)) if rest else q
    rows = split_dim(rows, 1, w).flatten(0, 1).flatten(2, 3).transpose(1, 2)
    keys, values = (
        pad(t, (0, 0, 0, 0, w, rest))
        .unfold(1, 2 * w, w)
        .transpose(3, 4)[:, :, :, None]
        .expand(-1, -1, -1, heads, -1, -1)
        .reshape(batch * count, groups * heads, 2 * w, t.shape[-1])
        for t in (k, v)
    )
    bias = _band(count, w, rows)
    if batch > 1:
        bias = bias.repeat(batch, 1, 1, 1)
    out = split_dim(_attend(rows, keys, values, bias, way).transpose(1, 2), 0, count)
    return split_dim(out.flatten(1, 2)[:, :seq_len], 2, heads)


def _window(q: Tensor, x: Branches, cfg: NSAConfig, way: Way) -> Tensor:
    """Sliding-window branch [B,S,G,h,Dv] of q [B,S,G,h,Dk]: the last w tokens, the current too."""
    with profile_range(WIN_RANGE):
        within = _causal if q.shape[1] <= cfg.w else _masked_window
        return within(q, x.k_win, x.v_win, cfg, way)


class _Mix(torch.autograd.Function):
    """Sum of the three branches [B,S,G,h,Dv], each times its gate [B,S,G,h,3] (equation 5).

    Computed in the type of the first branch, the accumulation type, and returned in the gates'.
    """

    @staticmethod
    def forward(ctx: Any, cmp: Tensor, sel: Tensor, win: Tensor, gates: Tensor) -> Tensor:
        """One pass over each branch."""
        ctx.save_for_backward(cmp, sel, win, gates)
        wide = gates.to(cmp.dtype)
        mixed = cmp * wide[..., 0:1]
        mixed = mixed.addcmul_(sel, wide[..., 1:2]).addcmul_(win, wide[..., 2:3])
        return mixed.to(gates.dtype, memory_format=torch.contiguous_format)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, ...]:
        """A gate's gradient is <gradient, branch>, a branch's is the gradient times its gate."""
        *branches, gates = ctx.saved_tensors
        wide = branches[0].dtype
        grad = grad_out.to(wide)[..., None, :]
        d_gates = torch.stack([branch.to(wide) for branch in branches], -2).mul_(grad).sum(-1)
        parts = (grad * gates.to(wide)[..., None]).unbind(-2)
        grads = [part.to(x.dtype) for part, x in zip(parts, branches, strict=True)]
        return *grads, d_gates.to(gates.dtype)


def _mixed(cmp: Tensor, sel: Tensor, win: Tensor, gates: Tensor) -> Tensor:
    """The same as it is written: a compiler puts it together itself."""
    wide = gates.to(cmp.dtype)
    mixed = cmp * wide[..., 0:1] + sel * wide[..., 1:2] + win * wide[..., 2:3]
    return mixed.to(gates.dtype)


def batched_sdpa(x: Branches, cfg: NSAConfig, way: Way) -> tuple[Tensor, Tensor]:
    """Output [B,S,H,Dv] and the selected blocks [B,S,G,n_sel]."""
    q = split_dim(x.q, 2, cfg.heads_per_group)
    if way.kernels == "triton":
        return _by_kernels(q, x, cfg, way)
    o_cmp, blocks = _compressed(q, x, cfg)
    o_sel = _selected(q, x, blocks, cfg, way)
    o_win = _window(q, x, cfg, way)
    with profile_range(GATE_RANGE):
        gates = split_dim(x.gates, 2, cfg.heads_per_group)
        mix = _mixed if torch.compiler.is_compiling() else _Mix.apply
        out = cast("Tensor", mix(o_cmp, o_sel, o_win, gates))
    return out.flatten(2, 3), blocks
