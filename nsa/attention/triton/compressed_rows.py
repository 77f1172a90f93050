"""Kernels of the compressed branch that own queries: output with log-sum-exp, gradient of queries.

Tiles of rows as in `rows`; a tile walks over the compressed keys that its last token sees. Those
are means, kept in float32, and their scores choose blocks: a bf16 key would choose others. So that
tensor cores can multiply them all the same, `exact_dot` takes each key as a sum of TERMS numbers
of the queries' type, and adds up the products: as exact as one product of float32.

Output and gradients choose nothing: for them a key is rounded to the queries' type, as keys of the
other branches are, and a score is one product. Their log-sum-exp is of the same rounded scores:
with the exact one a row's probabilities would not add up to 1 in the backward pass, which costs
gradients more than the rounding does. The forward pass keeps both: its first product is the
rounded score, and the others make it exact.
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
def rounded_dot(queries, keys):
    """Scores [ROWS, KEYS] of queries [ROWS, WIDTH] on keys [KEYS, WIDTH] rounded to their type."""
    return tl.dot(queries, tl.trans(keys.to(queries.dtype)), input_precision="ieee")


@triton.jit
def exact_dot(scores, queries, keys, TERMS: tl.constexpr):
    """Scores [ROWS, KEYS] on float32 keys [KEYS, WIDTH] from those of `rounded_dot`."""
    for _ in tl.static_range(TERMS - 1):
        keys = keys - keys.to(queries.dtype).to(tl.float32)
        part = tl.trans(keys.to(queries.dtype))
        scores = tl.dot(queries, part, scores, input_precision="ieee")
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
    q, k, v, out, lse, exact_lse, seq_len, groups, n_keys, scale,
    q_b, q_t, q_g, q_h, k_b, k_t, k_g, v_b, v_t, v_g,
    HEADS: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, WIDTH_K: tl.constexpr,
    WIDTH_V: tl.constexpr, L: tl.constexpr, STRIDE: tl.constexpr, TERMS: tl.constexpr,
    KEYS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Output [B,S,G,HEADS,D_V] of one tile and log-sum-exp [B*G, S*HEADS]. scale: by log2 e.

    lse: of rounded scores. exact_lse: of exact ones. k: float32. v: of the queries' type.
    """
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
    exact_total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, WIDTH_V), tl.float32)
    last = tl.minimum((tile * ROWS + ROWS - 1) // HEADS, seq_len - 1)
    for first in range(0, count_seen(last, n_keys, L, STRIDE), KEYS):
        keys = load_block(k, k_t, first // KEYS, n_keys, KEYS, KEYS, D_K, WIDTH_K)
        values = load_block(v, v_t, first // KEYS, n_keys, KEYS, KEYS, D_V, WIDTH_V)
        seen = seen_keys(token, first + tl.arange(0, KEYS), L, STRIDE)
        rounded = rounded_dot(queries, keys)
        exact = tl.where(seen, exact_dot(rounded, queries, keys, TERMS) * scale, NOTHING)
        scores = tl.where(seen, rounded * scale, NOTHING)
        before = best
        # One shift for both: rounding moves no score by more than its 2^-8.
        best, total, acc = absorb(best, total, acc, scores, values)
        shift = tl.where(best == NOTHING, 0.0, best)
        exact_total = exact_total * tl.exp2(before - shift)
        exact_total += tl.sum(tl.exp2(exact - shift[:, None]), 1)
    empty = total == 0.0
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    store_rows(
        out, acc, batch, group, token, head, inside, seq_len, groups, HEADS, D_V, WIDTH_V
    )  # fmt: skip
    to = pair * seq_len * HEADS + row
    # Of nothing, best is minus infinity, and so are both sums.
    tl.store(lse + to, best + tl.log2(tl.where(empty, 1.0, total)), inside)
    tl.store(exact_lse + to, best + tl.log2(tl.where(empty, 1.0, exact_total)), inside)


@triton.jit
def compressed_query_gradient_kernel(
    q, k, v, out, lse, grad, dq, delta, seq_len, groups, n_keys, scale, dq_scale,
    q_b, q_t, q_g, q_h, k_b, k_t, k_g, v_b, v_t, v_g,
    HEADS: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, WIDTH_K: tl.constexpr,
    WIDTH_V: tl.constexpr, L: tl.constexpr, STRIDE: tl.constexpr, KEYS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """dq [B,S,G,HEADS,D_K] of one tile, and delta, each row's <grad, out> [B*G, S*HEADS].

    k, v: rounded to the queries' type.
    """
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
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        p = tl.exp2(tl.where(seen, scores - sums[:, None], NOTHING))
        dp = tl.dot(grads, tl.trans(values), input_precision="ieee")
        ds = p * (dp - mine[:, None])
        acc = tl.dot(ds.to(queries.dtype), keys, acc, input_precision="ieee")
    store_rows(
        dq, acc * dq_scale, batch, group, token, head, inside, seq_len, groups, HEADS, D_K, WIDTH_K
    )  # fmt: skip
