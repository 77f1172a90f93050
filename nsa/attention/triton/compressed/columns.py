"""Kernels of the compressed branch that own keys: their gradients, without an atomic operation.

A compressed key is seen by every token after it. The tokens are cut into pieces: a program adds up
one piece for a tile of keys, and a second kernel adds the pieces in order. Every number has one
program that writes it, so that equal inputs give equal bits.
"""

import triton
import triton.language as tl

from nsa.attention.triton.compressed.rows import seen_keys
from nsa.attention.triton.rows import (
    give_keys,
    load_keys,
    load_rows,
    padded,
    store_keys,
    store_part,
    sum_parts,
)


@triton.jit
def _add(
    dk, dv, keys, values, key, first, end, q, grad, lse, delta, seq_len, groups, batch, group,
    scale, q_t, q_h, HEADS: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, L: tl.constexpr,
    STRIDE: tl.constexpr, ROWS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """What ROWS rows more add to the gradients of keys [KEYS, WIDTH_K] and values."""
    row = first + tl.arange(0, ROWS)
    inside = row < end
    # Rows beyond the piece have gradients and delta 0: they add nothing.
    token, head = row // HEADS, row % HEADS
    queries = load_rows(q, q_t, q_h, token, head, inside, D_K)
    step = groups * HEADS * D_V
    theirs = grad + (batch * seq_len * groups + group) * HEADS * D_V
    grads = load_rows(theirs, step, D_V, token, head, inside, D_V)
    sums = tl.load(lse + row, inside, 0.0)
    mine = tl.load(delta + row, inside, 0.0)
    scores = tl.dot(keys, tl.trans(queries), input_precision="ieee")
    p = tl.exp2(scores * scale - sums[None, :])
    if MASKED:
        p = tl.where(tl.trans(seen_keys(token, key, L, STRIDE)), p, 0.0)
    return give_keys(dk, dv, p, queries, grads, values, mine)


@triton.jit
def compressed_piece_kernel(
    q, k, v, rounded_grad, lse, delta, parts, seq_len, groups, n_keys, n_pieces, scale,
    q_b, q_t, q_g, q_h, k_b, k_t, k_g, v_b, v_t, v_g,
    HEADS: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, L: tl.constexpr,
    STRIDE: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """dK and dV of KEYS keys by PIECE tokens: float32 [KEYS, WIDTH_K + WIDTH_V].

    k, v, rounded_grad: rounded to the queries' type.
    """
    piece, tile = tl.program_id(0), tl.program_id(1)
    pair = tl.program_id(2).to(tl.int64)
    batch, group = pair // groups, pair % groups
    # No token before the end of the first key sees one of them; all see the last one from its end.
    start = tl.maximum(piece * PIECE, tile * KEYS * STRIDE + L - 1)
    whole = (tile * KEYS + KEYS - 1) * STRIDE + L - 1
    stop = tl.minimum(piece * PIECE + PIECE, seq_len)
    if start < stop:
        q += batch * q_b + group * q_g
        k += batch * k_b + group * k_g
        v += batch * v_b + group * v_g
        lse += pair * seq_len * HEADS
        delta += pair * seq_len * HEADS
        keys = load_keys(k, k_t, tile * KEYS, n_keys, KEYS, D_K)
        values = load_keys(v, v_t, tile * KEYS, n_keys, KEYS, D_V)
        dk = tl.zeros((KEYS, padded(D_K)), tl.float32)
        dv = tl.zeros((KEYS, padded(D_V)), tl.float32)
        key = tile * KEYS + tl.arange(0, KEYS)
        begin, end = start * HEADS, stop * HEADS
        masked = begin + tl.cdiv(tl.maximum(whole - start, 0) * HEADS, ROWS) * ROWS
        for see_all in tl.static_range(2):
            low, high = (masked, end) if see_all else (begin, tl.minimum(masked, end))
            for first in range(low, high, ROWS):
                dk, dv = _add(
                    dk, dv, keys, values, key, first, end, q, rounded_grad, lse, delta, seq_len,
                    groups, batch, group, scale, q_t, q_h, HEADS, D_K, D_V, L, STRIDE, ROWS,
                    not see_all,
                )  # fmt: skip
        of_tile = (pair * tl.num_programs(1) + tile) * n_pieces + piece
        store_part(parts, of_tile, dk, dv, KEYS, D_K, D_V)


@triton.jit
def compressed_sum_kernel(
    parts, dk, dv, groups, n_keys, n_pieces, n_tiles, dk_scale,
    D_K: tl.constexpr, D_V: tl.constexpr,
    L: tl.constexpr, STRIDE: tl.constexpr, KEYS: tl.constexpr, PIECE: tl.constexpr,
    FEW: tl.constexpr,
):  # fmt: skip
    """dk [B,N,G,D_K] and dv [B,N,G,D_V] of FEW keys: the sum over the pieces, in order."""
    key = tl.program_id(0) * FEW + tl.arange(0, FEW)
    pair = tl.program_id(1).to(tl.int64)
    batch, group = pair // groups, pair % groups
    tile = tl.program_id(0) * FEW // KEYS
    first = (tile * KEYS * STRIDE + L - 1) // PIECE
    number = (pair * n_tiles + tile) * n_pieces
    sum_k, sum_v = sum_parts(parts, number, first, n_pieces, key - tile * KEYS, KEYS, D_K, D_V)
    flat = (batch * n_keys + key.to(tl.int64)) * groups + group
    store_keys(dk, dv, sum_k, sum_v, flat, key < n_keys, dk_scale, D_K, D_V)
