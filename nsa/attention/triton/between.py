"""Between the branches: their gated sum.

A program takes ROWS rows, a row being one head of one token, and all heads of a batch element are
counted through: each number is read once, each result is written once, by one program.

Products and sums are float32, rounded when they are stored. A launch never asks the device for a
number.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.attention.triton.launch import device_of, inner
from nsa.attention.triton.rows import load_rows, padded


@triton.jit
def _rows(seq_len, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """The program's batch element, and of its rows number, token, head and whether they exist."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < seq_len * HEADS
    return tl.program_id(1).to(tl.int64), row, row // HEADS, (row % HEADS).to(tl.int64), inside


@triton.jit
def _wide(base, batch, token, head, inside, of_batch, of_token, of_head, D: tl.constexpr):
    """Rows [ROWS, WIDTH] of a tensor [B,S,HEADS,D], in float32."""
    rows = load_rows(base + batch * of_batch, of_token, of_head, token, head, inside, D)
    return rows.to(tl.float32)


@triton.jit
def _store(base, rows, number, inside, D: tl.constexpr):
    """Rows [ROWS, WIDTH] into [B,S,HEADS,D], at their number in all."""
    dim = tl.arange(0, padded(D))
    seen = inside[:, None] & (dim < D)[None, :]
    tl.store(base + (number * D)[:, None] + dim[None, :], rows.to(base.dtype.element_ty), seen)


@triton.jit
def mix_kernel(
    cmp, sel, win, gates, out, seq_len,
    cmp_b, cmp_t, cmp_h, sel_b, sel_t, sel_h, win_b, win_t, win_h, of_batch, of_token, of_head,
    HEADS: tl.constexpr, D_V: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Out [B,S,HEADS,D_V] of branches like it and gates [B,S,HEADS,3], a sum in the gates' order.

    of_batch, of_token, of_head: strides of the gates.
    """
    batch, row, token, head, inside = _rows(seq_len, HEADS, ROWS)
    gate = gates + batch * of_batch + token.to(tl.int64) * of_token + head * of_head
    of_cmp = tl.load(gate, inside, 0.0).to(tl.float32)
    of_sel = tl.load(gate + 1, inside, 0.0).to(tl.float32)
    of_win = tl.load(gate + 2, inside, 0.0).to(tl.float32)
    mixed = of_cmp[:, None] * _wide(cmp, batch, token, head, inside, cmp_b, cmp_t, cmp_h, D_V)
    mixed += of_sel[:, None] * _wide(sel, batch, token, head, inside, sel_b, sel_t, sel_h, D_V)
    mixed += of_win[:, None] * _wide(win, batch, token, head, inside, win_b, win_t, win_h, D_V)
    _store(out, mixed, batch * seq_len * HEADS + row, inside, D_V)


@triton.jit
def _gradients(grads, branch, gate, d_branch, d_gate, number, inside, D: tl.constexpr):
    """A gate's gradient is <gradient, branch>, a branch's is the gradient times its gate."""
    opened = tl.load(gate, inside, 0.0).to(tl.float32)
    _store(d_branch, grads * opened[:, None], number, inside, D)
    total = tl.sum(grads * branch, 1)
    tl.store(d_gate, total.to(d_gate.dtype.element_ty), inside)


@triton.jit
def mix_backward_kernel(
    grad, cmp, sel, win, gates, d_cmp, d_sel, d_win, d_gates, seq_len,
    grad_b, grad_t, grad_h, cmp_b, cmp_t, cmp_h, sel_b, sel_t, sel_h, win_b, win_t, win_h,
    of_batch, of_token, of_head,
    HEADS: tl.constexpr, D_V: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gradients of the branches [B,S,HEADS,D_V] and of the gates [B,S,HEADS,3]."""
    batch, row, token, head, inside = _rows(seq_len, HEADS, ROWS)
    number = batch * seq_len * HEADS + row
    gate = gates + batch * of_batch + token.to(tl.int64) * of_token + head * of_head
    d_gate = d_gates + number * 3
    grads = _wide(grad, batch, token, head, inside, grad_b, grad_t, grad_h, D_V)
    branch = _wide(cmp, batch, token, head, inside, cmp_b, cmp_t, cmp_h, D_V)
    _gradients(grads, branch, gate, d_cmp, d_gate, number, inside, D_V)
    branch = _wide(sel, batch, token, head, inside, sel_b, sel_t, sel_h, D_V)
    _gradients(grads, branch, gate + 1, d_sel, d_gate + 1, number, inside, D_V)
    branch = _wide(win, batch, token, head, inside, win_b, win_t, win_h, D_V)
    _gradients(grads, branch, gate + 2, d_win, d_gate + 2, number, inside, D_V)


# Numbers of a branch that a program of the sum takes: 16 for each thread, and several programs for
# each multiprocessor from 2,000 tokens of the production shape on.
_NUMBERS = 2048


def mix_constants(heads: int, d_v: int) -> dict[str, int]:
    """What the kernels are compiled for; heads: of all groups."""
    return {"HEADS": heads, "D_V": d_v, "ROWS": max(1, _NUMBERS // padded(d_v))}


def mix_forward(cmp: Tensor, sel: Tensor, win: Tensor, gates: Tensor) -> Tensor:
    """Output [B,S,H,Dv], in the type of the gates [B,S,H,3], of branches [B,S,H,Dv]."""
    tensors = [inner(x) for x in (cmp, sel, win, gates)]
    out = torch.empty(cmp.shape, dtype=gates.dtype, device=gates.device)
    grid, told = _how(out)
    with device_of(out):
        mix_kernel[grid](*tensors, out, cmp.shape[1], *_strides(tensors), **told)
    return out


def mix_backward(
    grad: Tensor, cmp: Tensor, sel: Tensor, win: Tensor, gates: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the three branches and of the gates, contiguous; equal bits each time."""
    tensors = [inner(x) for x in (grad, cmp, sel, win, gates)]
    d_cmp, d_sel, d_win, d_gates = (
        torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in tensors[1:]
    )
    grid, told = _how(d_cmp)
    with device_of(grad):
        mix_backward_kernel[grid](
            *tensors, d_cmp, d_sel, d_win, d_gates, cmp.shape[1], *_strides(tensors), **told
        )
    return d_cmp, d_sel, d_win, d_gates


def _how(out: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """Grid of a launch for branches like `out`, and what its kernel is compiled for."""
    batch, seq_len, heads, d_v = out.shape
    told = mix_constants(heads, d_v)
    return (triton.cdiv(seq_len * heads, told["ROWS"]), batch), told


def _strides(tensors: list[Tensor]) -> list[int]:
    """Of tensors [B,S,H,D], the last dimensions' left out."""
    return [stride for x in tensors for stride in x.stride()[:3]]
