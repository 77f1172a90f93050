"""Pooled keys and values before the compressed branch, and the gradients of their tokens.

Block i of compression is the mean of the tokens from i*STRIDE on, L of them. A program makes one
block of the keys and of the values, keys as terms (`compressed.rows`). Backwards it takes runs of
STRIDE tokens, which are in the same blocks, L/STRIDE at most: those that began last. Keys that are
compressed already are blocks of one token, L = STRIDE = 1. Kernels of several branches (`core`)
do both beside other work.

Sums are float32, rounded when they are stored.
"""

import triton
import triton.language as tl

from nsa.attention.triton.rows import padded, store_keys


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
def pool(
    k, v, terms, values, block, n_keys, groups, k_b, k_t, k_g, v_b, v_t, v_g,
    L: tl.constexpr, STRIDE: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr,
    TERMS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """One block of the terms [B,N,G,TERMS,D_K] and of the values [B,N,G,D_V] of k and v [B,T,G,D].

    Programs along axis 1 are pairs.
    """
    block = block.to(tl.int64)
    pair = tl.program_id(1).to(tl.int64)
    batch, group = pair // groups, pair % groups
    flat = (batch * n_keys + block) * groups + group
    mean = _mean(v, v_b, v_t, v_g, block, batch, group, L, STRIDE, D_V, TOKENS)
    _store_terms(values + flat * D_V, mean, D_V, 1)
    mean = _mean(k, k_b, k_t, k_g, block, batch, group, L, STRIDE, D_K, TOKENS)
    _store_terms(terms + flat * TERMS * D_K, mean, D_K, TERMS)


@triton.jit
def sum_pooled(
    parts, dk, dv, number, n_tokens, groups, n_keys, n_pieces, n_tiles, dk_scale,
    D_K: tl.constexpr, D_V: tl.constexpr, L: tl.constexpr, STRIDE: tl.constexpr,
    KEYS: tl.constexpr, PIECE: tl.constexpr, FEW: tl.constexpr, POOL: tl.constexpr,
    POOL_STRIDE: tl.constexpr,
):  # fmt: skip
    """dk [B,T,G,D_K] and dv [B,T,G,D_V] of FEW runs of POOL_STRIDE tokens, from pieces in order.

    POOL: tokens of a block. Programs along axis 1 are pairs.
    """
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
