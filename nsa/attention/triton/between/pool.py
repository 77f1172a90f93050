"""Kernels of pooling: compressed keys and values as means of tokens, and the tokens' gradients.

Block i of compression is the mean of the tokens from i*STRIDE on, L of them. A program makes one
block of the keys or of the values (axis 2 of the grid), or the gradients of TOKENS tokens: each is
in the L/STRIDE blocks, at most, that began last. Sums are float32.
"""

import triton
import triton.language as tl


@triton.jit
def _mean(
    x, to, x_b, x_t, x_g, n_blocks, groups, L: tl.constexpr, STRIDE: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """One block of x [B,S,G,D] into `to` [B,n_blocks,G,D]."""
    block = tl.program_id(0).to(tl.int64)
    pair = tl.program_id(1).to(tl.int64)
    batch, group = pair // groups, pair % groups
    inner, dim = tl.arange(0, TOKENS), tl.arange(0, WIDTH)
    x += batch * x_b + group * x_g + block * STRIDE * x_t
    total = tl.zeros((WIDTH,), tl.float32)
    for first in range(0, L, TOKENS):
        token = first + inner
        seen = (token < L)[:, None] & (dim < D)[None, :]
        at = token.to(tl.int64)[:, None] * x_t + dim[None, :]
        total += tl.sum(tl.load(x + at, seen, 0.0).to(tl.float32), 0)
    at = ((batch * n_blocks + block) * groups + group) * D + dim
    tl.store(to + at, total / L, dim < D)


@triton.jit
def pool_kernel(
    k, v, pooled_k, pooled_v, n_blocks, groups, k_b, k_t, k_g, v_b, v_t, v_g,
    L: tl.constexpr, STRIDE: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr,
    WIDTH_K: tl.constexpr, WIDTH_V: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Means float32 [B,n_blocks,G,D_K] and [B,n_blocks,G,D_V] of k and v [B,S,G,D]."""
    if tl.program_id(2) == 0:
        _mean(k, pooled_k, k_b, k_t, k_g, n_blocks, groups, L, STRIDE, D_K, WIDTH_K, TOKENS)
    else:
        _mean(v, pooled_v, v_b, v_t, v_g, n_blocks, groups, L, STRIDE, D_V, WIDTH_V, TOKENS)


@triton.jit
def _spread(
    grad, to, seq_len, n_blocks, groups, L: tl.constexpr, STRIDE: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Gradients of TOKENS tokens into `to` [B,S,G,D], from those of blocks [B,n_blocks,G,D]."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    pair = tl.program_id(1).to(tl.int64)
    batch, group = pair // groups, pair % groups
    dim = tl.arange(0, WIDTH)
    total = tl.zeros((TOKENS, WIDTH), tl.float32)
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
    WIDTH_K: tl.constexpr, WIDTH_V: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """dk [B,S,G,D_K] and dv [B,S,G,D_V] from float32 gradients of the means, contiguous."""
    if tl.program_id(2) == 0:
        _spread(grad_k, dk, seq_len, n_blocks, groups, L, STRIDE, D_K, WIDTH_K, TOKENS)
    else:
        _spread(grad_v, dv, seq_len, n_blocks, groups, L, STRIDE, D_V, WIDTH_V, TOKENS)
