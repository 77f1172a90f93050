"""Kernels that own queries: output with log-sum-exp, and the gradient of the queries.

A tile of rows walks over all blocks of keys up to its last token, for short sequences, where its
tokens together read nearly all of them. For long ones blocks own the work (`blocks`).

log-sum-exp is kept to the base 2; a row that reads nothing has minus infinity there and output 0.
"""

import triton
import triton.language as tl

from nsa.attention.triton.rows import (
    NOTHING,
    absorb,
    give_queries,
    load_keys,
    load_rows,
    padded,
    store_rows,
    this_tile,
)


@triton.jit
def ones(word):
    """How many bits of an int32 are set: sums of 2, 4, 8, 16 and 32 neighbors."""
    word = (word & 0x55555555) + ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word & 0x0F0F0F0F) + ((word >> 4) & 0x0F0F0F0F)
    word = (word & 0x00FF00FF) + ((word >> 8) & 0x00FF00FF)
    return (word & 0x0000FFFF) + ((word >> 16) & 0x0000FFFF)


@triton.jit
def load_block(base, stride, block, seq_len, L_SEL: tl.constexpr, D: tl.constexpr):
    """The keys or values [BLOCK, WIDTH] of a block; zeros beyond it, the sequence and D."""
    end = tl.minimum(block * L_SEL + L_SEL, seq_len)
    return load_keys(base, stride, block * L_SEL, end, padded(L_SEL), D)


@triton.jit
def block_side(
    k, v, block, batch, group, seq_len, k_b, k_t, k_g, v_b, v_t, v_g, L_SEL: tl.constexpr,
    D_K: tl.constexpr, D_V: tl.constexpr,
):  # fmt: skip
    """What a program that owns a block begins with: keys, values, each one's token (or seq_len)."""
    keys = load_block(k + batch * k_b + group * k_g, k_t, block, seq_len, L_SEL, D_K)
    values = load_block(v + batch * v_b + group * v_g, v_t, block, seq_len, L_SEL, D_V)
    inner = tl.arange(0, padded(L_SEL))
    return keys, values, tl.where(inner < L_SEL, block * L_SEL + inner, seq_len)


@triton.jit
def reads_block(words, block):
    """Which rows read a block, by its word of their bits."""
    return ((words >> (block % 32)) & 1) > 0


@triton.jit
def last_seen(token, block, L_SEL: tl.constexpr):
    """Which key of a block is the last that each row's token may see."""
    return tl.minimum(token - block * L_SEL, L_SEL - 1)


@triton.jit
def _attend(
    best, total, acc, queries, words, token, block, k, k_t, v, v_t, seq_len, scale,
    D_K: tl.constexpr, D_V: tl.constexpr, L_SEL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One block more in the running softmax. MASKED: some rows' tokens are in it."""
    keys = load_block(k, k_t, block, seq_len, L_SEL, D_K)
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    inner = tl.arange(0, padded(L_SEL))
    if MASKED:
        seen = inner[None, :] <= last_seen(token, block, L_SEL)[:, None]
        scores = tl.where(seen, scores, NOTHING)
    elif padded(L_SEL) > L_SEL:
        scores = tl.where((inner < L_SEL)[None, :], scores, NOTHING)
    values = load_block(v, v_t, block, seq_len, L_SEL, D_V)
    return absorb(best, total, acc, scores, scale, values, reads_block(words, block))


@triton.jit
def walk(tile, seq_len, HEADS: tl.constexpr, L_SEL: tl.constexpr, ROWS: tl.constexpr):
    """Up to which block all keys are before a tile's tokens, and up to which any are."""
    last = tl.minimum((tile * ROWS + ROWS - 1) // HEADS, seq_len - 1)
    return tile * ROWS // HEADS // L_SEL, last // L_SEL + 1


@triton.jit
def forward_kernel(
    q, k, v, bits, out, lse, cmp, win, gates, mixed, seq_len, groups, n_words, scale,
    q_b, q_t, q_g, q_h, k_b, k_t, k_g, v_b, v_t, v_g, gates_b, gates_t, gates_h,
    HEADS: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, L_SEL: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Output [B,S,G,HEADS,D_V] and log-sum-exp [B*G, S*HEADS] of one tile. scale: by log2 e.

    And the gated sum with the other branches (`store_mixed`).
    """
    tile, pair, batch, group, row, token, head, inside = this_tile(seq_len, groups, HEADS, ROWS)
    queries = load_rows(q + batch * q_b + group * q_g, q_t, q_h, token, head, inside, D_K)
    k += batch * k_b + group * k_g
    v += batch * v_b + group * v_g
    of_token = bits + pair * n_words * seq_len + token
    best = tl.full((ROWS,), NOTHING, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, padded(D_V)), tl.float32)
    whole, end = walk(tile, seq_len, HEADS, L_SEL, ROWS)
    for masked in tl.static_range(2):
        low, high = (whole, end) if masked else (0, whole)
        for block in range(low, high):
            words = tl.load(of_token + (block // 32) * seq_len, inside, 0)
            best, total, acc = _attend(
                best, total, acc, queries, words, token, block, k, k_t, v, v_t, seq_len, scale, D_K,
                D_V, L_SEL, masked,
            )  # fmt: skip
    empty = total == 0.0
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    dim = tl.arange(0, padded(D_V))
    # In this form six registers fewer on Hopper, so that two programs fit a multiprocessor.
    to = out + ((batch * seq_len + token.to(tl.int64)) * groups + group) * HEADS * D_V + head * D_V
    seen = inside[:, None] & (dim < D_V)[None, :]
    rounded = acc.to(out.dtype.element_ty)
    tl.store(to[:, None] + dim[None, :], rounded, seen)
    sums = tl.where(empty, NOTHING, best + tl.log2(tl.where(empty, 1.0, total)))
    tl.store(lse + pair * seq_len * HEADS + row, sums, inside)
    # What the backward pass reads of the branch, rounded as it is kept.
    store_mixed(
        mixed, rounded, cmp, win, gates, batch, group, token, head, inside, seq_len, groups,
        gates_b, gates_t, gates_h, HEADS, D_V,
    )  # fmt: skip


@triton.jit
def store_mixed(
    mixed, mine, cmp, win, gates, batch, group, token, head, inside, seq_len, groups, gates_b,
    gates_t, gates_h, HEADS: tl.constexpr, D_V: tl.constexpr,
):  # fmt: skip
    """The gated sum of rows [ROWS, WIDTH] of this branch with the others, by gates [B,S,G*HEADS,3].

    mixed, cmp, win: [B,S,G,HEADS,D_V].
    """
    far = token.to(tl.int64)
    gate = gates + batch * gates_b + far * gates_t + (group * HEADS + head) * gates_h
    values, step = (batch * seq_len * groups + group) * HEADS * D_V, groups * HEADS * D_V
    others = load_rows(cmp + values, step, D_V, token, head, inside, D_V).to(tl.float32)
    total = tl.load(gate, inside, 0.0).to(tl.float32)[:, None] * others
    total += tl.load(gate + 1, inside, 0.0).to(tl.float32)[:, None] * mine.to(tl.float32)
    others = load_rows(win + values, step, D_V, token, head, inside, D_V).to(tl.float32)
    total += tl.load(gate + 2, inside, 0.0).to(tl.float32)[:, None] * others
    store_rows(mixed, total, batch, group, token, head, inside, seq_len, groups, HEADS, D_V)


@triton.jit
def _gradient(
    acc, queries, grads, sums, delta, words, token, block, k, k_t, v, v_t, seq_len, scale,
    D_K: tl.constexpr, D_V: tl.constexpr, L_SEL: tl.constexpr,
):  # fmt: skip
    """What one block more adds to the gradient of the queries, before its scale."""
    keys = load_block(k, k_t, block, seq_len, L_SEL, D_K)
    values = load_block(v, v_t, block, seq_len, L_SEL, D_V)
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    p = tl.exp2(scores * scale - sums[:, None])
    # One comparison for both: what a row does not read ends before its first key.
    last = tl.where(reads_block(words, block), last_seen(token, block, L_SEL), -1)
    p = tl.where(tl.arange(0, padded(L_SEL))[None, :] <= last[:, None], p, 0.0)
    return give_queries(acc, p, grads, keys, values, delta)


@triton.jit
def give_by_selected(
    acc, tile, queries, grads, mine, sums, pair, batch, group, token, inside, k, v, bits, seq_len,
    n_words, scale, k_b, k_t, k_g, v_b, v_t, v_g,
    HEADS: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, L_SEL: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """What selected blocks add to the gradient of a tile's queries, before its scale."""
    k += batch * k_b + group * k_g
    v += batch * v_b + group * v_g
    of_token = bits + pair * n_words * seq_len + token
    _, end = walk(tile, seq_len, HEADS, L_SEL, ROWS)
    for block in range(end):
        words = tl.load(of_token + (block // 32) * seq_len, inside, 0)
        acc = _gradient(
            acc, queries, grads, sums, mine, words, token, block, k, k_t, v, v_t, seq_len, scale,
            D_K, D_V, L_SEL,
        )  # fmt: skip
    return acc
