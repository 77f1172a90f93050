"""Kernel of the sliding window that owns keys: their gradients and those of the values.

A program has KEYS neighboring keys of one kv group. Who sees them needs no list: the tokens from
the first key to w - 1 after the last. It adds up their rows in order and writes its keys alone.

Short sequences have fewer keys than a device wants programs: there each of several programs (axis 2
of the grid) takes one piece of the walk, and another kernel adds up what they wrote, in order.
"""

import triton
import triton.language as tl

from nsa.attention.triton.rows import give_keys, load_keys, load_rows
from nsa.attention.triton.window.rows import near


@triton.jit
def _gradients(
    dk, dv, keys, values, key, first, rows_end, q, q_t, q_h, grad, grad_t, lse, delta, w, scale,
    HEADS: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, WIDTH_K: tl.constexpr,
    WIDTH_V: tl.constexpr, ROWS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """What ROWS rows more add to the gradients of the keys, before its scale, and values."""
    row = first + tl.arange(0, ROWS)
    token, head = row // HEADS, row % HEADS
    inside = row < rows_end
    queries = load_rows(q, q_t, q_h, token, head, inside, D_K, WIDTH_K)
    grads = load_rows(grad, grad_t, D_V, token, head, inside, D_V, WIDTH_V)
    sums = tl.load(lse + row, inside, 0.0)
    theirs = tl.load(delta + row, inside, 0.0)
    scores = tl.dot(keys, tl.trans(queries), input_precision="ieee")
    p = tl.exp2(scores * scale - sums[None, :])
    if MASKED:
        p = tl.where(near(token[None, :], key[:, None], w) & inside[None, :], p, 0.0)
    return give_keys(dk, dv, p, queries, grads, values, theirs)


@triton.jit
def window_keys_kernel(
    q, k, v, grad, lse, delta, dk, dv, seq_len, groups, w, scale, dk_scale,
    q_b, q_t, q_g, q_h, k_b, k_t, k_g, v_b, v_t, v_g,
    HEADS: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, WIDTH_K: tl.constexpr,
    WIDTH_V: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dk [B,S,G,D_K] and dv [B,S,G,D_V] of KEYS keys; of several pieces: [pieces,B,S,G,D]."""
    first = tl.program_id(0) * KEYS
    pair = tl.program_id(1).to(tl.int64)
    batch, group = pair // groups, pair % groups
    keys = load_keys(k + batch * k_b + group * k_g, k_t, first, seq_len, KEYS, D_K, WIDTH_K)
    values = load_keys(v + batch * v_b + group * v_g, v_t, first, seq_len, KEYS, D_V, WIDTH_V)
    key = first + tl.arange(0, KEYS)
    q += batch * q_b + group * q_g
    grad += (batch * seq_len * groups + group) * HEADS * D_V
    lse += pair * seq_len * HEADS
    delta += pair * seq_len * HEADS
    sum_k = tl.zeros((KEYS, WIDTH_K), tl.float32)
    sum_v = tl.zeros((KEYS, WIDTH_V), tl.float32)
    last = tl.minimum(first + KEYS, seq_len) - 1
    begin, rows_end = first * HEADS, tl.minimum(last + w, seq_len) * HEADS
    # Tokens from the last key on, until the first key is too far behind, see them all.
    masked = tl.cdiv((last - first) * HEADS, ROWS)
    whole = (tl.minimum(first + w, seq_len) * HEADS - begin) // ROWS
    whole = tl.maximum(whole, masked)
    end = tl.cdiv(rows_end - begin, ROWS)
    masked, whole = tl.minimum(masked, end), tl.minimum(whole, end)
    piece, n_pieces = tl.program_id(2), tl.num_programs(2)
    low, high = end * piece // n_pieces, end * (piece + 1) // n_pieces
    for number in range(tl.maximum(masked, low), tl.minimum(whole, high)):
        sum_k, sum_v = _gradients(
            sum_k, sum_v, keys, values, key, begin + number * ROWS, rows_end, q, q_t, q_h, grad,
            groups * HEADS * D_V, lse, delta, w, scale, HEADS, D_K, D_V, WIDTH_K, WIDTH_V, ROWS,
            False,
        )  # fmt: skip
    # The masked ones of this piece at the beginning of the walk, and from where they go on.
    few, again = tl.maximum(tl.minimum(masked, high) - low, 0), tl.maximum(whole, low)
    for number in range(few + tl.maximum(high - again, 0)):
        at = tl.where(number < few, low + number, again + number - few)
        sum_k, sum_v = _gradients(
            sum_k, sum_v, keys, values, key, begin + at * ROWS, rows_end, q, q_t, q_h, grad,
            groups * HEADS * D_V, lse, delta, w, scale, HEADS, D_K, D_V, WIDTH_K, WIDTH_V, ROWS,
            True,
        )  # fmt: skip
    dim_k, dim_v = tl.arange(0, WIDTH_K), tl.arange(0, WIDTH_V)
    inside = (key < seq_len)[:, None]
    of_piece = piece * (tl.num_programs(1) // groups)
    flat = ((of_piece + batch) * seq_len + key.to(tl.int64)) * groups + group
    to_k = dk + (flat * D_K)[:, None] + dim_k[None, :]
    to_v = dv + (flat * D_V)[:, None] + dim_v[None, :]
    tl.store(to_k, (sum_k * dk_scale).to(dk.dtype.element_ty), inside & (dim_k < D_K)[None, :])
    tl.store(to_v, sum_v.to(dv.dtype.element_ty), inside & (dim_v < D_V)[None, :])


@triton.jit
def window_sum_kernel(
    parts_k, parts_v, dk, dv, n_k, n_v, PIECES: tl.constexpr, NUMBERS: tl.constexpr
):  # fmt: skip
    """dk, n_k numbers, and dv, n_v numbers, of float32 parts [PIECES, ...], added up in order."""
    if tl.program_id(1) == 0:
        _sum(parts_k, dk, n_k, PIECES, NUMBERS)
    else:
        _sum(parts_v, dv, n_v, PIECES, NUMBERS)


@triton.jit
def _sum(parts, to, n, PIECES: tl.constexpr, NUMBERS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    total = tl.zeros((NUMBERS,), tl.float32)
    for piece in range(PIECES):
        total += tl.load(parts + piece * n + at, at < n, 0.0)
    tl.store(to + at, total.to(to.dtype.element_ty), at < n)
