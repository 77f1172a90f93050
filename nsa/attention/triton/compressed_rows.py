"""Kernels of the compressed branch that own queries: output with log-sum-exp, gradient of queries.

Tiles of rows as in `rows`; a tile walks over the compressed keys that its last token sees. Those
are means, kept in float32, and their scores choose blocks: a bf16 key would choose others. So that
tensor cores can multiply them all the same, `exact_dot` takes each key as a sum of TERMS numbers
of the queries' type, and adds up the products: as exact as one product of float32.
"""

import triton
import triton.language as tl

from nsa.attention.triton.rows import (
    NOTHING,
    absorb,
    load_block,
    load_rows,
    query_side,
    store_rows,
    this_tile,
)


@triton.jit
def exact_dot(queries, keys, TERMS: tl.constexpr):
    """Scores [ROWS, KEYS] of queries [ROWS, WIDTH] on float32 keys [KEYS, WIDTH]."""
    part = keys.to(queries.dtype)
    scores = tl.dot(queries, tl.trans(part), input_precision="ieee")
    for _ in tl.static_range(TERMS - 1):
        keys = keys - part.to(tl.float32)
        part = keys.to(queries.dtype)
        scores = tl.dot(queries, tl.trans(part), scores, input_precision="ieee")
    return scores


@triton.jit
def seen_keys(token, key, L: tl.constexpr, STRIDE: tl.constexpr):
    """Which compressed keys [KEYS] each row sees [ROWS, KEYS]: those that end with it at last."""
    ends = key * STRIDE + L - 1
    return (ends[None, :] <= token[:, None]) & (key >= 0)[None, :]


@triton.jit
def count_seen(token, n_keys, L: tl.constexpr, STRIDE: tl.constexpr):
    """How many compressed keys a token sees."""
    return tl.where(token < L - 1, 0, tl.minimum((token + 1 - L) // STRIDE + 1, n_keys))


@triton.jit
def compressed_kernel(
    q, k, v, out, lse, seq_len, groups, n_keys, scale,
    q_b, q_t, q_g, q_h, k_b, k_t, k_g, v_b, v_t, v_g,
    HEADS: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, WIDTH_K: tl.constexpr,
    WIDTH_V: tl.constexpr, L: tl.constexpr, STRIDE: tl.constexpr, TERMS: tl.constexpr,
    KEYS: tl.constexpr, ROWS: tl.constexpr,
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
    for first in range(0, count_seen(last, n_keys, L, STRIDE), KEYS):
        keys = load_block(k, k_t, first // KEYS, n_keys, KEYS, KEYS, D_K, WIDTH_K)
        values = load_block(v, v_t, first // KEYS, n_keys, KEYS, KEYS, D_V, WIDTH_V)
        seen = seen_keys(token, first + tl.arange(0, KEYS), L, STRIDE)
        scores = tl.where(seen, exact_dot(queries, keys, TERMS) * scale, NOTHING)
        best, total, acc = absorb(best, total, acc, scores, values.to(queries.dtype))
    empty = total == 0.0
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    store_rows(
        out, acc, batch, group, token, head, inside, seq_len, groups, HEADS, D_V, WIDTH_V
    )  # fmt: skip
    sums = tl.where(empty, NOTHING, best + tl.log2(tl.where(empty, 1.0, total)))
    tl.store(lse + pair * seq_len * HEADS + row, sums, inside)


@triton.jit
def compressed_query_gradient_kernel(
    q, k, v, out, lse, grad, dq, delta, seq_len, groups, n_keys, scale, dq_scale,
    q_b, q_t, q_g, q_h, k_b, k_t, k_g, v_b, v_t, v_g,
    HEADS: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, WIDTH_K: tl.constexpr,
    WIDTH_V: tl.constexpr, L: tl.constexpr, STRIDE: tl.constexpr, TERMS: tl.constexpr,
    KEYS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dq [B,S,G,HEADS,D_K] of one tile, and delta, each row's <grad, out> [B*G, S*HEADS]."""
    tile, pair, row, token, head = this_tile(HEADS, ROWS)
    batch, group = pair // groups, pair % groups
    inside = token < seq_len
    queries, exact, mine, sums = query_side(
        q, out, grad, lse, delta, pair, batch, group, row, token, head, inside, seq_len, groups,
        q_b, q_t, q_g, q_h, HEADS, D_K, D_V, WIDTH_K, WIDTH_V,
    )  # fmt: skip
    grads = exact.to(queries.dtype)
    k += batch * k_b + group * k_g
    v += batch * v_b + group * v_g
    acc = tl.zeros((ROWS, WIDTH_K), tl.float32)
    last = tl.minimum((tile * ROWS + ROWS - 1) // HEADS, seq_len - 1)
    for first in range(0, count_seen(last, n_keys, L, STRIDE), KEYS):
        keys = load_block(k, k_t, first // KEYS, n_keys, KEYS, KEYS, D_K, WIDTH_K)
        values = load_block(v, v_t, first // KEYS, n_keys, KEYS, KEYS, D_V, WIDTH_V)
        seen = seen_keys(token, first + tl.arange(0, KEYS), L, STRIDE)
        scores = exact_dot(queries, keys, TERMS) * scale
        p = tl.exp2(tl.where(seen, scores - sums[:, None], NOTHING))
        dp = tl.dot(grads, tl.trans(values.to(grads.dtype)), input_precision="ieee")
        ds = p * (dp - mine[:, None])
        acc = tl.dot(ds.to(queries.dtype), keys.to(queries.dtype), acc, input_precision="ieee")
    store_rows(
        dq, acc * dq_scale, batch, group, token, head, inside, seq_len, groups, HEADS, D_K, WIDTH_K
    )  # fmt: skip
