"""Kernels of the sliding window: output with log-sum-exp, gradients of queries and of keys.

Rows and tiles are those of `rows`. A tile of queries walks over the keys from the first that its
first token sees to its last token, KEYS at a time; a program of the last kernel owns KEYS keys, and
walks over the rows of all tokens that see one of them. In between every row sees every key: only
the tiles at the two ends of a walk are masked, and they come last. Every number has one program
that writes it, and no order depends on chance: equal inputs give equal bits.

log-sum-exp is kept to the base 2. A row always sees its own token.
"""

import triton
import triton.language as tl

from nsa.attention.triton.rows import (
    NOTHING,
    give_queries,
    load_keys,
    load_rows,
    query_side,
    store_rows,
    this_tile,
)


@triton.jit
def near(token, key, w):
    """Does a token see a key?"""
    return (key <= token) & (key > token - w)


@triton.jit
def span(first, last, w, KEYS: tl.constexpr):
    """Walk of a tile of tokens: its first key; tiles that are masked, until which whole, in all."""
    start = tl.maximum(first - w + 1, 0)
    masked = tl.cdiv(tl.maximum(last - w + 1 - start, 0), KEYS)
    whole = tl.maximum((first + 1 - start) // KEYS, masked)
    return start, masked, whole, tl.cdiv(last + 1 - start, KEYS)


@triton.jit
def _absorb(
    best, total, acc, queries, token, first, k, k_t, v, v_t, seq_len, w, scale,
    D_K: tl.constexpr, D_V: tl.constexpr, WIDTH_K: tl.constexpr, WIDTH_V: tl.constexpr,
    KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """KEYS keys more in the running softmax: largest score, sum and output of each row."""
    keys = load_keys(k, k_t, first, seq_len, KEYS, D_K, WIDTH_K)
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    if MASKED:
        key = first + tl.arange(0, KEYS)
        scores = tl.where(near(token[:, None], key[None, :], w), scores, NOTHING)
    # Scaled with the subtraction, in one instruction.
    higher = tl.maximum(best, tl.max(scores, 1) * scale)
    shift = higher
    if MASKED:
        # Rows that have seen nothing yet: minus infinity less itself is no number.
        shift = tl.where(higher == NOTHING, 0.0, higher)
    p = tl.exp2(scores * scale - shift[:, None])
    keep = tl.exp2(best - shift)
    values = load_keys(v, v_t, first, seq_len, KEYS, D_V, WIDTH_V)
    acc = acc * keep[:, None]
    acc = tl.dot(p.to(values.dtype), values, acc, input_precision="ieee")
    return higher, total * keep + tl.sum(p, 1), acc


@triton.jit
def window_kernel(
    q, k, v, out, lse, seq_len, groups, w, scale,
    q_b, q_t, q_g, q_h, k_b, k_t, k_g, v_b, v_t, v_g,
    HEADS: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, WIDTH_K: tl.constexpr,
    WIDTH_V: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Output [B,S,G,HEADS,D_V] and log-sum-exp [B*G, S*HEADS] of one tile. scale: by log2 e."""
    tile, pair, row, token, head = this_tile(HEADS, ROWS)
    batch, group = pair // groups, pair % groups
    inside = token < seq_len
    queries = load_rows(
        q + batch * q_b + group * q_g, q_t, q_h, token, head, inside, D_K, WIDTH_K
    )  # fmt: skip
    k += batch * k_b + group * k_g
    v += batch * v_b + group * v_g
    best = tl.full((ROWS,), NOTHING, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, WIDTH_V), tl.float32)
    last = tl.minimum((tile * ROWS + ROWS - 1) // HEADS, seq_len - 1)
    start, masked, whole, end = span(tile * ROWS // HEADS, last, w, KEYS)
    for number in range(masked, whole):
        best, total, acc = _absorb(
            best, total, acc, queries, token, start + number * KEYS, k, k_t, v, v_t, seq_len, w,
            scale, D_K, D_V, WIDTH_K, WIDTH_V, KEYS, False,
        )  # fmt: skip
    for number in range(masked + end - whole):
        at = tl.where(number < masked, number, number - masked + whole)
        best, total, acc = _absorb(
            best, total, acc, queries, token, start + at * KEYS, k, k_t, v, v_t, seq_len, w,
            scale, D_K, D_V, WIDTH_K, WIDTH_V, KEYS, True,
        )  # fmt: skip
    # Rows beyond the sequence may have seen nothing, and are not stored.
    acc = acc / total[:, None]
    store_rows(
        out, acc, batch, group, token, head, inside, seq_len, groups, HEADS, D_V, WIDTH_V
    )  # fmt: skip
    tl.store(lse + pair * seq_len * HEADS + row, best + tl.log2(total), inside)


@triton.jit
def _gradient(
    acc, queries, grads, sums, delta, token, first, k, k_t, v, v_t, seq_len, w, scale,
    D_K: tl.constexpr, D_V: tl.constexpr, WIDTH_K: tl.constexpr, WIDTH_V: tl.constexpr,
    KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """What KEYS keys more add to the gradient of the queries, before its scale."""
    keys = load_keys(k, k_t, first, seq_len, KEYS, D_K, WIDTH_K)
    values = load_keys(v, v_t, first, seq_len, KEYS, D_V, WIDTH_V)
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    p = tl.exp2(scores * scale - sums[:, None])
    if MASKED:
        key = first + tl.arange(0, KEYS)
        p = tl.where(near(token[:, None], key[None, :], w), p, 0.0)
    return give_queries(acc, p, grads, keys, values, delta)


@triton.jit
def window_query_kernel(
    q, k, v, out, lse, grad, dq, delta, seq_len, groups, w, scale, dq_scale,
    q_b, q_t, q_g, q_h, k_b, k_t, k_g, v_b, v_t, v_g,
    HEADS: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, WIDTH_K: tl.constexpr,
    WIDTH_V: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dq [B,S,G,HEADS,D_K] of one tile, and delta, each row's <grad, out> [B*G, S*HEADS]."""
    tile, pair, row, token, head = this_tile(HEADS, ROWS)
    batch, group = pair // groups, pair % groups
    inside = token < seq_len
    queries, grads, mine, sums = query_side(
        q, out, grad, lse, delta, pair, batch, group, row, token, head, inside, seq_len, groups,
        q_b, q_t, q_g, q_h, HEADS, D_K, D_V, WIDTH_K, WIDTH_V,
    )  # fmt: skip
    k += batch * k_b + group * k_g
    v += batch * v_b + group * v_g
    acc = tl.zeros((ROWS, WIDTH_K), tl.float32)
    last = tl.minimum((tile * ROWS + ROWS - 1) // HEADS, seq_len - 1)
    start, masked, whole, end = span(tile * ROWS // HEADS, last, w, KEYS)
    for number in range(masked, whole):
        acc = _gradient(
            acc, queries, grads, sums, mine, token, start + number * KEYS, k, k_t, v, v_t, seq_len,
            w, scale, D_K, D_V, WIDTH_K, WIDTH_V, KEYS, False,
        )  # fmt: skip
    for number in range(masked + end - whole):
        at = tl.where(number < masked, number, number - masked + whole)
        acc = _gradient(
            acc, queries, grads, sums, mine, token, start + at * KEYS, k, k_t, v, v_t, seq_len,
            w, scale, D_K, D_V, WIDTH_K, WIDTH_V, KEYS, True,
        )  # fmt: skip
    store_rows(
        dq, acc * dq_scale, batch, group, token, head, inside, seq_len, groups, HEADS, D_K, WIDTH_K
    )  # fmt: skip
