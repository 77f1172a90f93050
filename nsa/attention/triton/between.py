"""Between the branches: pooled keys and values before them, the gated sum after them.

Block i of compression is the mean of the tokens from i*STRIDE on, L of them. A program makes one
block of the keys or of the values (axis 2 of the grid), keys as terms (`compressed.rows`).
Backwards it takes runs of STRIDE tokens, which are in the same blocks, L/STRIDE at most: those that
began last. Keys that are compressed already are blocks of one token, L = STRIDE = 1. These two are
started with the compressed branch.

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
from nsa.attention.triton.rows import load_rows, padded, store_keys


@triton.jit
def _mean(
    x, x_b, x_t, x_g, block, batch, group, L: tl.constexpr, STRIDE: tl.constexpr, D: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """One block of x [B,T,G,D], float32 [WIDTH]."""
    inner, dim = tl.arange(0, TOKENS), tl.arange(0, padded(D))
    x += batch * x_b + group * x_g + block * STRIDE * x_t
    total = tl.zeros((padded(D),), tl.float32)
    for first in range(0, L, TOKENS):
        token = first + inner
        seen = (token < L)[:, None] & (dim < D)[None, :]
        at = token.to(tl.int64)[:, None] * x_t + dim[None, :]
        total += tl.sum(tl.load(x + at, seen, 0.0).to(tl.float32), 0)
    return total / L


@triton.jit
def _store_terms(to, rest, D: tl.constexpr, TERMS: tl.constexpr):
    """A block [WIDTH] as the sum of TERMS numbers of the type of `to` [TERMS,D]."""
    dim = tl.arange(0, padded(D))
    for term in tl.static_range(TERMS):
        part = rest.to(to.dtype.element_ty)
        tl.store(to + term * D + dim, part, dim < D)
        rest -= part.to(tl.float32)


@triton.jit
def pool_kernel(
    k, v, terms, values, n_keys, groups, k_b, k_t, k_g, v_b, v_t, v_g, L: tl.constexpr,
    STRIDE: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, TERMS: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Terms [B,N,G,TERMS,D_K] and values [B,N,G,D_V] of k and v [B,T,G,D]."""
    pool(
        k, v, terms, values, tl.program_id(0), tl.program_id(2) == 0, n_keys, groups,
        k_b, k_t, k_g, v_b, v_t, v_g, L, STRIDE, D_K, D_V, TERMS, TOKENS,
    )  # fmt: skip


@triton.jit
def pool(
    k, v, terms, values, block, of_keys, n_keys, groups, k_b, k_t, k_g, v_b, v_t, v_g,
    L: tl.constexpr, STRIDE: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr,
    TERMS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """One block of the keys or of the values; programs along axis 1 are pairs."""
    block = block.to(tl.int64)
    pair = tl.program_id(1).to(tl.int64)
    batch, group = pair // groups, pair % groups
    flat = (batch * n_keys + block) * groups + group
    if of_keys:
        mean = _mean(k, k_b, k_t, k_g, block, batch, group, L, STRIDE, D_K, TOKENS)
        _store_terms(terms + flat * TERMS * D_K, mean, D_K, TERMS)
    else:
        mean = _mean(v, v_b, v_t, v_g, block, batch, group, L, STRIDE, D_V, TOKENS)
        _store_terms(values + flat * D_V, mean, D_V, 1)


@triton.jit
def compressed_sum_kernel(
    parts, dk, dv, n_tokens, groups, n_keys, n_pieces, n_tiles, dk_scale,
    D_K: tl.constexpr, D_V: tl.constexpr, L: tl.constexpr, STRIDE: tl.constexpr,
    KEYS: tl.constexpr, PIECE: tl.constexpr, FEW: tl.constexpr, POOL: tl.constexpr,
    POOL_STRIDE: tl.constexpr,
):  # fmt: skip
    """dk [B,T,G,D_K] and dv [B,T,G,D_V] of FEW runs of POOL_STRIDE tokens, from pieces in order.

    POOL: tokens of a block.
    """
    sum_pooled(
        parts, dk, dv, tl.program_id(0), n_tokens, groups, n_keys, n_pieces, n_tiles, dk_scale,
        D_K, D_V, L, STRIDE, KEYS, PIECE, FEW, POOL, POOL_STRIDE,
    )  # fmt: skip


@triton.jit
def sum_pooled(
    parts, dk, dv, number, n_tokens, groups, n_keys, n_pieces, n_tiles, dk_scale,
    D_K: tl.constexpr, D_V: tl.constexpr, L: tl.constexpr, STRIDE: tl.constexpr,
    KEYS: tl.constexpr, PIECE: tl.constexpr, FEW: tl.constexpr, POOL: tl.constexpr,
    POOL_STRIDE: tl.constexpr,
):  # fmt: skip
    """The same of FEW runs with a number; programs along axis 1 are pairs."""
    run = number * FEW + tl.arange(0, FEW)
    pair = tl.program_id(1).to(tl.int64)
    batch, group = pair // groups, pair % groups
    width: tl.constexpr = padded(D_K) + padded(D_V)
    dim_k, dim_v = tl.arange(0, padded(D_K)), tl.arange(0, padded(D_V))
    total_k = tl.zeros((FEW, padded(D_K)), tl.float32)
    total_v = tl.zeros((FEW, padded(D_V)), tl.float32)
    for age in tl.static_range(POOL // POOL_STRIDE):
        key = run - age
        real = (key >= 0) & (key < n_keys)
        tile = key // KEYS
        # Before it no token sees a key of the tile, and nothing was written.
        first = (tile * KEYS * STRIDE + L - 1) // PIECE
        sum_k = tl.zeros((FEW, padded(D_K)), tl.float32)
        sum_v = tl.zeros((FEW, padded(D_V)), tl.float32)
        for piece in range(tl.min(tl.where(real, first, n_pieces)), n_pieces):
            of_tile = (pair * n_tiles + tile) * n_pieces + piece
            at = parts + ((of_tile * KEYS + key - tile * KEYS) * width)[:, None]
            there = (real & (piece >= first))[:, None]
            sum_k += tl.load(at + dim_k[None, :], there, 0.0)
            sum_v += tl.load(at + padded(D_K) + dim_v[None, :], there, 0.0)
        total_k += sum_k * dk_scale
        total_v += sum_v
    for place in range(POOL_STRIDE):
        token = run * POOL_STRIDE + place
        flat = (batch * n_tokens + token.to(tl.int64)) * groups + group
        store_keys(
            dk, dv, total_k / POOL, total_v / POOL, flat, token < n_tokens, 1.0, D_K, D_V
        )  # fmt: skip


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
