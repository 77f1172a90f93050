"""Kernels of the gated sum: the three branches, each times its gate, and what their gradients are.

A program takes ROWS rows, a row being one head of one token, and all heads of a batch element are
counted through: each number is read once, each result is written once, by one program. Products
and sums are float32, rounded when they are stored.
"""

import triton
import triton.language as tl

from nsa.attention.triton.rows import load_rows


@triton.jit
def _rows(seq_len, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """The program's batch element, and of its rows number, token, head and whether they exist."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < seq_len * HEADS
    return tl.program_id(1).to(tl.int64), row, row // HEADS, (row % HEADS).to(tl.int64), inside


@triton.jit
def _wide(
    base, batch, token, head, inside, of_batch, of_token, of_head, D: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Rows [ROWS, WIDTH] of a tensor [B,S,HEADS,D], in float32."""
    rows = load_rows(
        base + batch * of_batch, of_token, of_head, token, head, inside, D, WIDTH
    )  # fmt: skip
    return rows.to(tl.float32)


@triton.jit
def _store(base, rows, number, inside, D: tl.constexpr, WIDTH: tl.constexpr):
    """Rows [ROWS, WIDTH] into [B,S,HEADS,D], at their number in all."""
    dim = tl.arange(0, WIDTH)
    seen = inside[:, None] & (dim < D)[None, :]
    tl.store(base + (number * D)[:, None] + dim[None, :], rows.to(base.dtype.element_ty), seen)


@triton.jit
def mix_kernel(
    cmp, sel, win, gates, out, seq_len,
    cmp_b, cmp_t, cmp_h, sel_b, sel_t, sel_h, win_b, win_t, win_h, of_batch, of_token, of_head,
    HEADS: tl.constexpr, D_V: tl.constexpr, WIDTH_V: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Out [B,S,HEADS,D_V] of branches like it and gates [B,S,HEADS,3], a sum in the gates' order.

    of_batch, of_token, of_head: strides of the gates.
    """
    batch, row, token, head, inside = _rows(seq_len, HEADS, ROWS)
    gate = gates + batch * of_batch + token.to(tl.int64) * of_token + head * of_head
    of_cmp = tl.load(gate, inside, 0.0).to(tl.float32)
    of_sel = tl.load(gate + 1, inside, 0.0).to(tl.float32)
    of_win = tl.load(gate + 2, inside, 0.0).to(tl.float32)
    mixed = of_cmp[:, None] * _wide(
        cmp, batch, token, head, inside, cmp_b, cmp_t, cmp_h, D_V, WIDTH_V
    )  # fmt: skip
    mixed += of_sel[:, None] * _wide(
        sel, batch, token, head, inside, sel_b, sel_t, sel_h, D_V, WIDTH_V
    )  # fmt: skip
    mixed += of_win[:, None] * _wide(
        win, batch, token, head, inside, win_b, win_t, win_h, D_V, WIDTH_V
    )  # fmt: skip
    _store(out, mixed, batch * seq_len * HEADS + row, inside, D_V, WIDTH_V)


@triton.jit
def _gradients(
    grads, branch, gate, d_branch, d_gate, number, inside, D: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """A gate's gradient is <gradient, branch>, a branch's is the gradient times its gate."""
    opened = tl.load(gate, inside, 0.0).to(tl.float32)
    _store(d_branch, grads * opened[:, None], number, inside, D, WIDTH)
    total = tl.sum(grads * branch, 1)
    tl.store(d_gate, total.to(d_gate.dtype.element_ty), inside)


@triton.jit
def mix_backward_kernel(
    grad, cmp, sel, win, gates, d_cmp, d_sel, d_win, d_gates, seq_len,
    grad_b, grad_t, grad_h, cmp_b, cmp_t, cmp_h, sel_b, sel_t, sel_h, win_b, win_t, win_h,
    of_batch, of_token, of_head,
    HEADS: tl.constexpr, D_V: tl.constexpr, WIDTH_V: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gradients of the branches [B,S,HEADS,D_V] and of the gates [B,S,HEADS,3]."""
    batch, row, token, head, inside = _rows(seq_len, HEADS, ROWS)
    number = batch * seq_len * HEADS + row
    gate = gates + batch * of_batch + token.to(tl.int64) * of_token + head * of_head
    d_gate = d_gates + number * 3
    grads = _wide(grad, batch, token, head, inside, grad_b, grad_t, grad_h, D_V, WIDTH_V)
    branch = _wide(cmp, batch, token, head, inside, cmp_b, cmp_t, cmp_h, D_V, WIDTH_V)
    _gradients(grads, branch, gate, d_cmp, d_gate, number, inside, D_V, WIDTH_V)
    branch = _wide(sel, batch, token, head, inside, sel_b, sel_t, sel_h, D_V, WIDTH_V)
    _gradients(grads, branch, gate + 1, d_sel, d_gate + 1, number, inside, D_V, WIDTH_V)
    branch = _wide(win, batch, token, head, inside, win_b, win_t, win_h, D_V, WIDTH_V)
    _gradients(grads, branch, gate + 2, d_win, d_gate + 2, number, inside, D_V, WIDTH_V)
