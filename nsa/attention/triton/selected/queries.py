"""Kernels that give to queries: output with log-sum-exp, and the gradient of the queries.

For short sequences a tile of rows walks over all blocks of keys up to its last token, where its
tokens together read nearly all of them.

For long ones blocks own the work. A program takes one block and a piece of the list of its readers
(`readers`), so that every row of a tile reads the block: nothing is multiplied in vain, whatever
its neighbors read. What a block gives a row, an output with its log-sum-exp or a share of the row's
gradient, is stored in a place of that row alone, and a second kernel puts a row's places together
in their order, which is the blocks': no atomic operation, and equal bits for equal inputs. Parts
are of the call's own type; they are kept for a run of `tokens` positions from `begin` at a time:
parts [B*G, tokens, PLACES, HEADS, D]; sums float32 [B*G, tokens, PLACES, HEADS].

log-sum-exp is kept to the base 2; a row that reads nothing has minus infinity there and output 0.
"""

import triton
import triton.language as tl

from nsa.attention.triton.rows import (
    NOTHING,
    absorb,
    block_side,
    give_queries,
    load_block,
    load_rows,
    padded,
    store_rows,
    this_tile,
)
from nsa.attention.triton.selected.readers import (
    list_of_run,
    load_readers,
    this_piece,
    tile_of_readers,
)


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


@triton.jit
def _rows_of_run(
    read, begin, tokens, seq_len, HEADS: tl.constexpr, PLACES: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """A tile of a run: pair, number, token, head, whether inside, how many parts, the first one."""
    pair = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, head = begin + row // HEADS, row % HEADS
    inside = token < tl.minimum(begin + tokens, seq_len)
    n_parts = tl.load(read + pair * seq_len + token, inside, 0)
    first = (pair * tokens + token - begin) * PLACES * HEADS + head
    return pair, row, token, head, inside, n_parts, first


@triton.jit
def _store_parts(parts, rows, to, D: tl.constexpr):
    """Rows [ROWS, WIDTH] into parts."""
    dim = tl.arange(0, padded(D))
    at = parts + (to.to(tl.int64) * D)[:, None] + dim[None, :]
    rounded = rows.to(parts.dtype.element_ty)
    if padded(D) == D:
        tl.store(at, rounded)
    else:
        tl.store(at, rounded, (dim < D)[None, :])


@triton.jit
def part_kernel(
    q, k, v, parts, sums, readers, counts, offsets, piece_ends, begin, tokens, seq_len, groups,
    n_blocks, list_len, scale, q_b, q_t, q_g, q_h, k_b, k_t, k_g, v_b, v_t, v_g,
    HEADS: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, L_SEL: tl.constexpr,
    PLACES: tl.constexpr, ROWS: tl.constexpr, PIECE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of PIECE readers by one block. scale: by log2 e."""
    pair = tl.program_id(1).to(tl.int64)
    batch, group = pair // groups, pair % groups
    block, start, rows, masked = this_piece(
        counts, offsets, piece_ends, tl.program_id(0), list_of_run(begin // tokens, pair), begin,
        pair, n_blocks, list_len, HEADS, L_SEL, ROWS, PIECE, BLOCKS,
    )  # fmt: skip
    if block < n_blocks:
        q += batch * q_b + group * q_g
        keys, values, key = block_side(
            k, v, block, batch, group, seq_len, k_b, k_t, k_g, v_b, v_t, v_g, L_SEL, D_K, D_V
        )  # fmt: skip
        token_0 = (pair * tokens - begin) * PLACES * HEADS
        parts += token_0 * D_V
        sums += token_0
        for at_start in tl.static_range(2):
            low, high = (0, tl.minimum(masked, rows)) if at_start else (masked, rows)
            for first in range(low, high, ROWS):
                token, head, to = tile_of_readers(
                    readers, start, first, rows, HEADS, PLACES, ROWS
                )  # fmt: skip
                queries = load_readers(q, q_t, q_h, token, head, D_K)
                scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
                if at_start:
                    # A reader sees the first token of its block at least.
                    scores = tl.where(key[None, :] <= token[:, None], scores, NOTHING)
                elif padded(L_SEL) > L_SEL:
                    scores = tl.where((key < seq_len)[None, :], scores, NOTHING)
                best = tl.max(scores, 1) * scale
                # Scaled here, it is one instruction with the difference.
                p = tl.exp2(scores * scale - best[:, None])
                log = tl.log2(tl.sum(p, 1))
                part = tl.dot(p.to(values.dtype), values, input_precision="ieee")
                _store_parts(parts, part * tl.exp2(-log)[:, None], to, D_V)
                tl.store(sums + to, best + log)


@triton.jit
def merge_kernel(
    parts, sums, read, out, lse, cmp, win, gates, mixed, begin, tokens, seq_len, groups,
    gates_b, gates_t, gates_h, HEADS: tl.constexpr, D_V: tl.constexpr, PLACES: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Output [B,S,G,HEADS,D_V] and log-sum-exp [B*G, S*HEADS] of rows of a run, from their parts.

    And the gated sum with the other branches. read: how many parts each token has.
    """
    pair, row, token, head, inside, n_parts, first = _rows_of_run(
        read, begin, tokens, seq_len, HEADS, PLACES, ROWS
    )  # fmt: skip
    dim = tl.arange(0, padded(D_V))
    best = tl.full((ROWS,), NOTHING, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, padded(D_V)), tl.float32)
    for place in range(PLACES):
        at, is_there = first + place * HEADS, place < n_parts
        other = tl.load(sums + at, is_there, NOTHING)
        seen = is_there[:, None] & (dim < D_V)[None, :]
        part = tl.load(parts + (at * D_V)[:, None] + dim[None, :], seen, 0.0)
        higher = tl.maximum(best, other)
        shift = tl.where(higher == NOTHING, 0.0, higher)
        mine, theirs = tl.exp2(best - shift), tl.exp2(other - shift)
        acc = acc * mine[:, None] + part.to(tl.float32) * theirs[:, None]
        total = total * mine + theirs
        best = higher
    total = tl.where(total == 0.0, 1.0, total)
    rounded = (acc / total[:, None]).to(out.dtype.element_ty)
    batch, group = pair // groups, pair % groups
    store_rows(out, rounded, batch, group, token, head, inside, seq_len, groups, HEADS, D_V)
    tl.store(lse + pair * seq_len * HEADS + begin * HEADS + row, best + tl.log2(total), inside)
    store_mixed(
        mixed, rounded, cmp, win, gates, batch, group, token, head, inside, seq_len, groups,
        gates_b, gates_t, gates_h, HEADS, D_V,
    )  # fmt: skip


@triton.jit
def gradient_part_kernel(
    q, k, v, grad, lse, delta, parts, readers, counts, offsets, piece_ends, begin, tokens, seq_len,
    groups, n_blocks, list_len, scale, dq_scale,
    q_b, q_t, q_g, q_h, k_b, k_t, k_g, v_b, v_t, v_g,
    HEADS: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, L_SEL: tl.constexpr,
    PLACES: tl.constexpr, ROWS: tl.constexpr, PIECE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """What one block adds to the gradients of PIECE readers."""
    pair = tl.program_id(1).to(tl.int64)
    batch, group = pair // groups, pair % groups
    block, start, rows, masked = this_piece(
        counts, offsets, piece_ends, tl.program_id(0), list_of_run(begin // tokens, pair), begin,
        pair, n_blocks, list_len, HEADS, L_SEL, ROWS, PIECE, BLOCKS,
    )  # fmt: skip
    if block < n_blocks:
        q += batch * q_b + group * q_g
        grad += (batch * seq_len * groups + group) * HEADS * D_V
        keys, values, key = block_side(
            k, v, block, batch, group, seq_len, k_b, k_t, k_g, v_b, v_t, v_g, L_SEL, D_K, D_V
        )  # fmt: skip
        parts += (pair * tokens - begin) * PLACES * HEADS * D_K
        lse += pair * seq_len * HEADS
        delta += pair * seq_len * HEADS
        for at_start in tl.static_range(2):
            low, high = (0, tl.minimum(masked, rows)) if at_start else (masked, rows)
            for first in range(low, high, ROWS):
                token, head, to = tile_of_readers(
                    readers, start, first, rows, HEADS, PLACES, ROWS
                )  # fmt: skip
                queries = load_readers(q, q_t, q_h, token, head, D_K)
                grads = load_readers(grad, groups * HEADS * D_V, D_V, token, head, D_V)
                mine = tl.load(lse + token * HEADS + head)
                theirs = tl.load(delta + token * HEADS + head)
                scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
                p = tl.exp2(scores * scale - mine[:, None])
                if at_start or padded(L_SEL) > L_SEL:
                    p = tl.where(key[None, :] <= token[:, None], p, 0.0)
                part = give_queries(None, p, grads, keys, values, theirs)
                _store_parts(parts, part * dq_scale, to, D_K)


@triton.jit
def gradient_merge_kernel(
    parts, read, dq, begin, tokens, seq_len, groups,
    HEADS: tl.constexpr, D_K: tl.constexpr, PLACES: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """dq [B,S,G,HEADS,D_K] of rows of a run: the sum of their parts, in order."""
    pair, _, token, head, inside, n_parts, first = _rows_of_run(
        read, begin, tokens, seq_len, HEADS, PLACES, ROWS
    )  # fmt: skip
    dim = tl.arange(0, padded(D_K))
    acc = tl.zeros((ROWS, padded(D_K)), tl.float32)
    for place in range(PLACES):
        seen = (place < n_parts)[:, None] & (dim < D_K)[None, :]
        at = ((first + place * HEADS) * D_K)[:, None] + dim[None, :]
        acc += tl.load(parts + at, seen, 0.0).to(tl.float32)
    store_rows(
        dq, acc, pair // groups, pair % groups, token, head, inside, seq_len, groups, HEADS, D_K
    )  # fmt: skip
