"""Kernels: which queries read each block, as bits and lists, and the gradients of keys and values.

Chosen blocks become bits with the choice (`compressed.top`).

bits int32 [B*G, words, S]: bit b of word w says whether the query reads block 32*w + b. Tokens lie
innermost, so that neighboring queries are neighboring addresses. Neither bits nor lists have
S x S/l_sel entries.

Of each block there is one list, ascending, and those of a pair lie one after the other in the order
of blocks. A run of positions therefore has a stretch of every list: list 0 of counts, offsets and
piece_ends int32 [1 + runs, B*G, n_blocks] is the whole sequence's, list 1 + r that of run r. Where
each query keeps what every block gives it in a place of its own, an entry is token*PLACES + place:
its block is the place-th that it reads.

Gradients need no atomic operation. Each list is cut into pieces: a program adds up one piece of one
block, in the list's order, and `sums_kernel` adds the pieces in theirs. Every number has one
program that writes it, so that equal inputs give equal bits.
"""

import triton
import triton.language as tl

from nsa.attention.triton.rows import (
    block_side,
    give_keys,
    padded,
    store_keys,
    store_part,
    sum_parts,
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
def place_kernel(bits, before, read, seq_len, n_words, TOKENS: tl.constexpr):
    """How many blocks each query reads: before each word, and in all.

    before int8 [B*G, words, S]; read int32 [B*G, S].
    """
    pair = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = token < seq_len
    total = tl.zeros((TOKENS,), tl.int32)
    for word in range(n_words):
        at = (pair * n_words + word) * seq_len + token
        tl.store(before + at, total.to(tl.int8), mask=inside)
        total += ones(tl.load(bits + at, mask=inside, other=0))
    tl.store(read + pair * seq_len + token, total, mask=inside)


@triton.jit
def list_of_run(run, pair):
    """Number of a run's list among those of all pairs; programs along axis 1 are pairs."""
    return (1 + run) * tl.num_programs(1) + pair


@triton.jit
def _begin_list(
    counts, offsets, piece_ends, block, pair, run, n_blocks, PIECE: tl.constexpr,
    PIECE_OF_RUN: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Where the list of a run's block begins, by the counts of all runs; kept for who reads it.

    And how many pieces end with the block's. Those of list 0 are written with the first run.
    """
    number = tl.arange(0, BLOCKS)
    upto, n_runs = number <= block, tl.num_programs(2)
    total = tl.zeros((BLOCKS,), tl.int32)
    earlier = tl.zeros((BLOCKS,), tl.int32)
    mine = tl.zeros((BLOCKS,), tl.int32)
    for other in range(n_runs):
        count = tl.load(counts + list_of_run(other, pair) * n_blocks + number, upto, 0)
        total += count
        earlier += tl.where((number == block) & (other < run), count, 0)
        mine += tl.where(other == run, count, 0)
    first = tl.sum(tl.where(number < block, total, 0), 0)
    begin = first + tl.sum(earlier, 0)
    to = list_of_run(run, pair) * n_blocks + block
    tl.store(offsets + to, begin)
    tl.store(piece_ends + to, tl.sum((mine + PIECE_OF_RUN - 1) // PIECE_OF_RUN, 0))
    if run == 0:
        whole = pair * n_blocks + block
        tl.store(counts + whole, tl.sum(total, 0) - first)
        tl.store(offsets + whole, first)
        tl.store(piece_ends + whole, tl.sum((total + PIECE - 1) // PIECE, 0))
    return begin


@triton.jit
def list_kernel(
    bits, before, counts, offsets, piece_ends, readers, tokens, seq_len, n_words, n_blocks,
    list_len, L_SEL: tl.constexpr, TOKENS: tl.constexpr, FILL: tl.constexpr, PLACES: tl.constexpr,
    PIECE: tl.constexpr, PIECE_OF_RUN: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The queries of one run that read one block: how many (counts), or (FILL) their list.

    readers int32 [B*G, list_len]. A run has `tokens` positions. before: of `place_kernel`; with
    PLACES = 1 nothing is read of it.
    """
    block = tl.program_id(0)
    pair = tl.program_id(1).to(tl.int64)
    run = tl.program_id(2)
    begin = run * tokens
    end = tl.minimum(begin + tokens, seq_len)
    of_word = (pair * n_words + block // 32) * seq_len
    lower = (tl.full((), -1, tl.int32) << (block % 32)) ^ -1
    base = tl.full((), 0, tl.int32)
    if FILL:
        base = _begin_list(
            counts, offsets, piece_ends, block, pair, run, n_blocks, PIECE, PIECE_OF_RUN, BLOCKS
        )  # fmt: skip
    # No query before a block's first token reads it.
    for first in range(tl.maximum(block * L_SEL, begin), end, TOKENS):
        token = first + tl.arange(0, TOKENS)
        words = tl.load(bits + of_word + token, mask=token < end, other=0)
        reads = (words >> (block % 32)) & 1
        if FILL:
            to = base + tl.cumsum(reads, 0) - reads
            entry = token
            if PLACES > 1:
                others = tl.load(before + of_word + token, mask=token < end, other=0)
                entry = token * PLACES + others.to(tl.int32) + ones(words & lower)
            tl.store(readers + pair * list_len + to, entry, mask=reads > 0)
        base += tl.sum(reads, 0)
    if not FILL:
        tl.store(counts + list_of_run(run, pair) * n_blocks + block, base)


@triton.jit
def this_piece(
    counts, offsets, piece_ends, piece, of_list, begin, pair, n_blocks, list_len,
    HEADS: tl.constexpr, L_SEL: tl.constexpr, ROWS: tl.constexpr, PIECE: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """The block of a piece (n_blocks: of none), where its readers begin, how many rows, and masked.

    of_list: number of the list, counted over lists and pairs; it has tokens from `begin` on.
    masked: up to which row, a multiple of ROWS, tokens may be of the block itself. Lists ascend,
    and none has more of them than L_SEL: later rows see all of it.
    """
    number = tl.arange(0, BLOCKS)
    ends = tl.load(piece_ends + of_list * n_blocks + number, number < n_blocks, 2147483647)
    block = tl.sum((ends <= piece).to(tl.int32), 0)
    of_block, real = of_list * n_blocks + block, block < n_blocks
    before = tl.load(piece_ends + of_block - 1, real & (block > 0), 0)
    skipped = (piece - before) * PIECE
    start = pair * list_len + tl.load(offsets + of_block, real, 0) + skipped
    rows = tl.minimum(tl.load(counts + of_block, real, 0) - skipped, PIECE) * HEADS
    own = tl.where(begin < (block + 1) * L_SEL, tl.maximum(L_SEL - skipped, 0), 0)
    return block, start, rows, tl.cdiv(own * HEADS, ROWS) * ROWS


@triton.jit
def tile_of_readers(
    readers, start, first, rows, HEADS: tl.constexpr, PLACES: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """A tile of readers: their token, head, and which part is theirs.

    Parts are counted from those of the pair's token 0. Rows beyond the last repeat it, and store
    the same numbers again: so no row needs a mask.
    """
    row = tl.minimum(first + tl.arange(0, ROWS), rows - 1)
    # Without a sign, division and offsets of 64 bits take fewer instructions.
    entry = tl.load(readers + start + row // HEADS).to(tl.uint32)
    head = row % HEADS
    return entry // PLACES, head, entry * HEADS + head


@triton.jit
def load_readers(base, token_stride, head_stride, token, head, D: tl.constexpr):
    """Rows [ROWS, WIDTH] of a tile of readers; zeros beyond D."""
    dim = tl.arange(0, padded(D))
    at = base + (token.to(tl.int64) * token_stride + head * head_stride)[:, None] + dim[None, :]
    if padded(D) == D:
        return tl.load(at)
    return tl.load(at, (dim < D)[None, :], 0.0)


@triton.jit
def piece_kernel(
    q, k, v, grad, lse, delta, readers, counts, offsets, piece_ends, parts, seq_len, groups,
    n_blocks, n_pieces, list_len, scale,
    q_b, q_t, q_g, q_h, k_b, k_t, k_g, v_b, v_t, v_g,
    HEADS: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, L_SEL: tl.constexpr,
    ROWS: tl.constexpr, PLACES: tl.constexpr, PIECE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """dK and dV of one block by PIECE of its readers: float32 [BLOCK, WIDTH_K + WIDTH_V].

    Of the whole sequence, which is the first list: that of a pair has the pair's number.
    """
    piece = tl.program_id(0)
    pair = tl.program_id(1).to(tl.int64)
    batch, group = pair // groups, pair % groups
    block, start, rows, _masked = this_piece(
        counts, offsets, piece_ends, piece, pair, 0, pair, n_blocks, list_len, HEADS, L_SEL, ROWS,
        PIECE, BLOCKS,
    )  # fmt: skip
    if block < n_blocks:
        q += batch * q_b + group * q_g
        grad += (batch * seq_len * groups + group) * HEADS * D_V
        keys, values, key = block_side(
            k, v, block, batch, group, seq_len, k_b, k_t, k_g, v_b, v_t, v_g, L_SEL, D_K, D_V
        )  # fmt: skip
        lse += pair * seq_len * HEADS
        delta += pair * seq_len * HEADS
        dk = tl.zeros((padded(L_SEL), padded(D_K)), tl.float32)
        dv = tl.zeros((padded(L_SEL), padded(D_V)), tl.float32)
        for first in range(0, rows, ROWS):
            token, head, _to = tile_of_readers(readers, start, first, rows, HEADS, PLACES, ROWS)
            queries = load_readers(q, q_t, q_h, token, head, D_K)
            grads = load_readers(grad, groups * HEADS * D_V, D_V, token, head, D_V)
            # Rows beyond the last have probability 0.
            inside = first + tl.arange(0, ROWS) < rows
            sums = tl.load(lse + token * HEADS + head, inside, float("inf"))
            theirs = tl.load(delta + token * HEADS + head)
            scores = tl.dot(keys, tl.trans(queries), input_precision="ieee")
            p = tl.exp2(scores * scale - sums[None, :])
            p = tl.where(key[:, None] <= token[None, :], p, 0.0)
            dk, dv = give_keys(dk, dv, p, queries, grads, values, theirs)
        store_part(parts, pair * n_pieces + piece, dk, dv, padded(L_SEL), D_K, D_V)


@triton.jit
def sum_block(
    parts, piece_ends, dk, dv, block, few, seq_len, groups, n_blocks, n_pieces, dk_scale,
    D_K: tl.constexpr, D_V: tl.constexpr, L_SEL: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """dk [B,S,G,D_K] and dv [B,S,G,D_V] of FEW tokens of a block: sums over its pieces, in order.

    Few, because the first block and a program's wait for memory are what takes the time. Programs
    along axis 1 are pairs.
    """
    pair = tl.program_id(1).to(tl.int64)
    batch, group = pair // groups, pair % groups
    inner = few * FEW + tl.arange(0, FEW)
    of_block = pair * n_blocks + block
    first = tl.load(piece_ends + of_block - 1, block > 0, 0)
    end = tl.load(piece_ends + of_block)
    number = pair * n_pieces
    sum_k, sum_v = sum_parts(parts, number, first, end, inner, padded(L_SEL), D_K, D_V)
    token = block * L_SEL + inner
    inside = (inner < L_SEL) & (token < seq_len)
    flat = (batch * seq_len + token.to(tl.int64)) * groups + group
    store_keys(dk, dv, sum_k, sum_v, flat, inside, dk_scale, D_K, D_V)
