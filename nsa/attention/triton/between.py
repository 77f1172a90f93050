"""Between the branches: pooled keys and values before them, the gated sum after them.

Block i of compression is the mean of the tokens from i*STRIDE on, L of them. A program makes one
block of the keys or of the values (axis 2 of the grid), or the gradients of TOKENS tokens: each is
in the L/STRIDE blocks, at most, that began last.

Of the sum a program takes ROWS rows, a row being one head of one token, and all heads of a batch
element are counted through: each number is read once, each result is written once, by one program.

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
from nsa.config import NSAConfig


@triton.jit
def _mean(
    x, to, x_b, x_t, x_g, n_blocks, groups, L: tl.constexpr, STRIDE: tl.constexpr, D: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """One block of x [B,S,G,D] into `to` [B,n_blocks,G,D]."""
    block = tl.program_id(0).to(tl.int64)
    pair = tl.program_id(1).to(tl.int64)
    batch, group = pair // groups, pair % groups
    inner, dim = tl.arange(0, TOKENS), tl.arange(0, padded(D))
    x += batch * x_b + group * x_g + block * STRIDE * x_t
    total = tl.zeros((padded(D),), tl.float32)
    for first in range(0, L, TOKENS):
        token = first + inner
        seen = (token < L)[:, None] & (dim < D)[None, :]
        at = token.to(tl.int64)[:, None] * x_t + dim[None, :]
        total += tl.sum(tl.load(x + at, seen, 0.0).to(tl.float32), 0)
    at = ((batch * n_blocks + block) * groups + group) * D + dim
    tl.store(to + at, total / L, dim < D)


@triton.jit
def pool_kernel(
    k, v, pooled_k, pooled_v, n_blocks, groups, k_b, k_t, k_g, v_b, v_t, v_g, L: tl.constexpr,
    STRIDE: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Means float32 [B,n_blocks,G,D_K] and [B,n_blocks,G,D_V] of k and v [B,S,G,D]."""
    if tl.program_id(2) == 0:
        _mean(k, pooled_k, k_b, k_t, k_g, n_blocks, groups, L, STRIDE, D_K, TOKENS)
    else:
        _mean(v, pooled_v, v_b, v_t, v_g, n_blocks, groups, L, STRIDE, D_V, TOKENS)


@triton.jit
def _spread(
    grad, to, seq_len, n_blocks, groups, L: tl.constexpr, STRIDE: tl.constexpr, D: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Gradients of TOKENS tokens into `to` [B,S,G,D], from those of blocks [B,n_blocks,G,D]."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    pair = tl.program_id(1).to(tl.int64)
    batch, group = pair // groups, pair % groups
    dim = tl.arange(0, padded(D))
    total = tl.zeros((TOKENS, padded(D)), tl.float32)
    for age in range(L // STRIDE):
        block = token // STRIDE - age
        seen = ((block >= 0) & (block < n_blocks))[:, None] & (dim < D)[None, :]
        at = ((batch * n_blocks + block) * groups + group) * D
        total += tl.load(grad + at[:, None] + dim[None, :], seen, 0.0)
    at = ((batch * seq_len + token) * groups + group) * D
    seen = (token < seq_len)[:, None] & (dim < D)[None, :]
    tl.store(to + at[:, None] + dim[None, :], (total / L).to(to.dtype.element_ty), seen)


@triton.jit
def pool_backward_kernel(
    grad_k, grad_v, dk, dv, seq_len, n_blocks, groups,
    L: tl.constexpr, STRIDE: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """dk [B,S,G,D_K] and dv [B,S,G,D_V] from float32 gradients of the means, contiguous."""
    if tl.program_id(2) == 0:
        _spread(grad_k, dk, seq_len, n_blocks, groups, L, STRIDE, D_K, TOKENS)
    else:
        _spread(grad_v, dv, seq_len, n_blocks, groups, L, STRIDE, D_V, TOKENS)


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


# Tokens that a program of pooling reads, or writes the gradients of, at once: a block of the
# production shape.
_TOKENS = 32
# Numbers of a branch that a program of the sum takes: 16 for each thread, and several programs for
# each multiprocessor from 2,000 tokens of the production shape on.
_NUMBERS = 2048


def pool_constants(cfg: NSAConfig) -> dict[str, int]:
    """What the kernels are compiled for."""
    return {"L": cfg.l, "STRIDE": cfg.d, "D_K": cfg.d_k, "D_V": cfg.d_v, "TOKENS": _TOKENS}


def pool_forward(k: Tensor, v: Tensor, cfg: NSAConfig) -> tuple[Tensor, Tensor]:
    """Means float32 [B,N,G,D] of k [B,S,G,Dk] and v [B,S,G,Dv]."""
    batch, seq_len, groups = k.shape[:3]
    n_blocks = cfg.n_compressed(seq_len)
    k, v = inner(k), inner(v)
    pooled_k, pooled_v = (
        torch.empty(batch, n_blocks, groups, x.shape[-1], dtype=torch.float32, device=x.device)
        for x in (k, v)
    )
    if n_blocks:
        with device_of(k):
            pool_kernel[n_blocks, batch * groups, 2](
                k, v, pooled_k, pooled_v, n_blocks, groups, *k.stride()[:3], *v.stride()[:3],
                **pool_constants(cfg),
            )  # fmt: skip
    return pooled_k, pooled_v


def pool_backward(
    grad_k: Tensor, grad_v: Tensor, seq_len: int, dtype: torch.dtype, cfg: NSAConfig
) -> tuple[Tensor, Tensor]:
    """Gradients of k and v [B,S,G,D] of a type from those of their means; equal bits each time."""
    batch, n_blocks, groups = grad_k.shape[:3]
    grad_k, grad_v = grad_k.contiguous(), grad_v.contiguous()
    dk, dv = (
        torch.empty(batch, seq_len, groups, x.shape[-1], dtype=dtype, device=x.device)
        for x in (grad_k, grad_v)
    )
    with device_of(dk):
        pool_backward_kernel[triton.cdiv(seq_len, _TOKENS), batch * groups, 2](
            grad_k, grad_v, dk, dv, seq_len, n_blocks, groups, **pool_constants(cfg)
        )
    return dk, dv


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
