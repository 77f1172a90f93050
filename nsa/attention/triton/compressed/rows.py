"""Kernels of the compressed branch that own queries, and pooling before and after them.

Compressed keys are means, kept in float32, and their scores choose blocks: a bf16 key would choose
others. So that tensor cores can multiply them all the same, a key is taken as a sum of TERMS
numbers of the queries' type, the largest first, and the products are added up. Three terms of bf16
are as exact as one product of float32. Two of fp16 are that only for keys near 1: the second cannot
be finer than 2^-25, so small keys lose digits (keys of a 64th: 7.7e-6 of sum |q||k|, where float32
has 3.9e-7). The first term is the key rounded. Every tile reads the terms, so they are made once
for a call (`between`), of which the backward pass reads the first.

Tiles of rows are as in `rows`; a tile walks over the compressed keys that its last token sees,
first over those that its first token sees, where no row has to look which key it sees.

Output and gradients choose nothing: for them a key is rounded to the queries' type, as keys of the
other branches are, and a score is one product. Their log-sum-exp is of the same rounded scores:
with the exact one a row's probabilities would not add up to 1 in the backward pass, which costs
gradients more than the rounding does. The forward pass keeps both: its first product is the
rounded score, and the others make it exact.

Pooling: block i of compression is the mean of the tokens from i*STRIDE on, L of them. A program
makes one block of the keys and of the values, keys as terms. Backwards it takes runs of STRIDE
tokens, which are in the same blocks, L/STRIDE at most: those that began last. Keys that are
compressed already are blocks of one token, L = STRIDE = 1. Kernels of several branches (`core`) do
both beside other work. Sums are float32, rounded when they are stored.
"""

import triton
import triton.language as tl

from nsa.attention.triton.rows import (
    NOTHING,
    give_queries,
    load_keys,
    load_rows,
    padded,
    store_keys,
    store_rows,
    this_tile,
)


@triton.jit
def load_terms(base, stride, key, n_keys, D: tl.constexpr, TERMS: tl.constexpr):
    """The terms of keys, each [KEYS, WIDTH]; zeros beyond the first key, the last one and D."""
    dim = tl.arange(0, padded(D))
    inside = ((key >= 0) & (key < n_keys))[:, None] & (dim < D)[None, :]
    at = base + key.to(tl.int64)[:, None] * stride + dim[None, :]
    terms = ()
    for term in tl.static_range(TERMS):
        terms += (tl.load(at + term * D, inside, 0.0),)
    return terms


@triton.jit
def rounded_dot(queries, terms):
    """Scores [ROWS, KEYS] of queries [ROWS, WIDTH] on keys rounded to their type."""
    return tl.dot(queries, tl.trans(terms[0]), input_precision="ieee")


@triton.jit
def exact_dot(scores, queries, terms, TERMS: tl.constexpr):
    """Scores [ROWS, KEYS] on keys that are the sum of their terms, from those of `rounded_dot`."""
    for term in tl.static_range(1, TERMS):
        scores = tl.dot(queries, tl.trans(terms[term]), scores, input_precision="ieee")
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
def walk(
    tile, seq_len, n_keys, HEADS: tl.constexpr, L: tl.constexpr, STRIDE: tl.constexpr,
    KEYS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Up to which key a tile's rows see all of them, a multiple of KEYS, and up to which any."""
    last = tl.minimum((tile * ROWS + ROWS - 1) // HEADS, seq_len - 1)
    whole = count_seen(tile * ROWS // HEADS, n_keys, L, STRIDE) // KEYS * KEYS
    return whole, count_seen(last, n_keys, L, STRIDE)


@triton.jit
def _absorb(
    best, total, exact_total, acc, queries, token, first, terms, k_t, v, v_t, n_keys, scale,
    D_K: tl.constexpr, D_V: tl.constexpr,
    L: tl.constexpr, STRIDE: tl.constexpr, TERMS: tl.constexpr, KEYS: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """KEYS keys more in the running softmax: largest score, both sums and output of each row."""
    key = first + tl.arange(0, KEYS)
    keys = load_terms(terms, k_t, key, n_keys, D_K, TERMS)
    scores = rounded_dot(queries, keys)
    exact = exact_dot(scores, queries, keys, TERMS)
    if MASKED:
        seen = seen_keys(token, key, L, STRIDE)
        scores = tl.where(seen, scores, NOTHING)
        exact = tl.where(seen, exact, NOTHING)
    # Scaled with the subtraction, in one instruction.
    higher = tl.maximum(best, tl.max(scores, 1) * scale)
    shift = higher
    if MASKED:
        # Rows that have seen nothing yet: minus infinity less itself is no number.
        shift = tl.where(higher == NOTHING, 0.0, higher)
    p = tl.exp2(scores * scale - shift[:, None])
    keep = tl.exp2(best - shift)
    # One shift for both: rounding moves no score by more than its 2^-8.
    exact_total = exact_total * keep + tl.sum(tl.exp2(exact * scale - shift[:, None]), 1)
    values = load_keys(v, v_t, first, n_keys, KEYS, D_V)
    acc = acc * keep[:, None]
    acc = tl.dot(p.to(values.dtype), values, acc, input_precision="ieee")
    return higher, total * keep + tl.sum(p, 1), exact_total, acc


@triton.jit
def compressed_kernel(
    q, terms, v, out, lse, exact_lse, seq_len, groups, n_keys, scale,
    q_b, q_t, q_g, q_h, k_b, k_t, k_g, v_b, v_t, v_g,
    HEADS: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, L: tl.constexpr,
    STRIDE: tl.constexpr, TERMS: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Output [B,S,G,HEADS,D_V] of one tile and log-sum-exp [B*G, S*HEADS]. scale: by log2 e.

    lse: of rounded scores. exact_lse: of exact ones. terms, v: of the queries' type.
    """
    tile, pair, batch, group, row, token, head, inside = this_tile(seq_len, groups, HEADS, ROWS)
    queries = load_rows(q + batch * q_b + group * q_g, q_t, q_h, token, head, inside, D_K)
    terms += batch * k_b + group * k_g
    v += batch * v_b + group * v_g
    best = tl.full((ROWS,), NOTHING, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    exact_total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, padded(D_V)), tl.float32)
    whole, end = walk(tile, seq_len, n_keys, HEADS, L, STRIDE, KEYS, ROWS)
    for at_end in tl.static_range(2):
        low, high = (whole, end) if at_end else (0, whole)
        for first in range(low, high, KEYS):
            best, total, exact_total, acc = _absorb(
                best, total, exact_total, acc, queries, token, first, terms, k_t, v, v_t, n_keys,
                scale, D_K, D_V, L, STRIDE, TERMS, KEYS, at_end,
            )  # fmt: skip
    empty = total == 0.0
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    store_rows(out, acc, batch, group, token, head, inside, seq_len, groups, HEADS, D_V)
    to = pair * seq_len * HEADS + row
    # Of nothing, best is minus infinity, and so are both sums.
    tl.store(lse + to, best + tl.log2(tl.where(empty, 1.0, total)), inside)
    tl.store(exact_lse + to, best + tl.log2(tl.where(empty, 1.0, exact_total)), inside)


@triton.jit
def _gradient(
    acc, queries, grads, sums, delta, token, first, k, k_t, v, v_t, n_keys, scale,
    D_K: tl.constexpr, D_V: tl.constexpr,
    L: tl.constexpr, STRIDE: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """What KEYS keys more add to the gradient of the queries, before its scale."""
    keys = load_keys(k, k_t, first, n_keys, KEYS, D_K)
    values = load_keys(v, v_t, first, n_keys, KEYS, D_V)
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    p = tl.exp2(scores * scale - sums[:, None])
    if MASKED:
        p = tl.where(seen_keys(token, first + tl.arange(0, KEYS), L, STRIDE), p, 0.0)
    return give_queries(acc, p, grads, keys, values, delta)


@triton.jit
def give_by_compressed(
    acc, tile, queries, grads, mine, sums, batch, group, token, k, v, seq_len, n_keys, scale,
    k_b, k_t, k_g, v_b, v_t, v_g,
    HEADS: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, L: tl.constexpr,
    STRIDE: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """What compressed keys add to the gradient of a tile's queries, before its scale."""
    k += batch * k_b + group * k_g
    v += batch * v_b + group * v_g
    whole, end = walk(tile, seq_len, n_keys, HEADS, L, STRIDE, KEYS, ROWS)
    for at_end in tl.static_range(2):
        low, high = (whole, end) if at_end else (0, whole)
        for first in range(low, high, KEYS):
            acc = _gradient(
                acc, queries, grads, sums, mine, token, first, k, k_t, v, v_t, n_keys, scale, D_K,
                D_V, L, STRIDE, KEYS, at_end,
            )  # fmt: skip
    return acc


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
