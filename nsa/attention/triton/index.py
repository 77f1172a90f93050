"""Kernels: which blocks each query reads, as bits, and which queries read each block, as lists.

bits int32 [B*G, words, S]: bit b of word w says whether the query reads block 32*w + b. Tokens lie
innermost, so that neighboring queries are neighboring addresses. Neither has S x S/l_sel entries.

Lists are of the queries from `begin` to `end`. Where each query keeps what every block gives it in
a place of its own, an entry is token*PLACES + place: its block is the place-th that it reads.
"""

import triton
import triton.language as tl


@triton.jit
def pack_kernel(
    ranges, bits, seq_len, groups, n_words, L_SEL: tl.constexpr, N_SEL: tl.constexpr,
    PLACES: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Bits of one word for a run of queries, from their token ranges [B,S,G,N_SEL,2]."""
    pair = tl.program_id(1).to(tl.int64)
    word = tl.program_id(2)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    place = tl.arange(0, PLACES)
    inside = (token < seq_len)[:, None] & (place < N_SEL)[None, :]
    far = (pair // groups * seq_len + token.to(tl.int64)) * groups + pair % groups
    at = (far[:, None] * N_SEL + place[None, :]) * 2
    start = tl.load(ranges + at, mask=inside, other=0).to(tl.int32)
    end = tl.load(ranges + at + 1, mask=inside, other=0).to(tl.int32)
    # Ranges are disjoint, and begin with a block: their bits are, too, so that a sum is a union.
    low = tl.minimum(tl.maximum(start // L_SEL - word * 32, 0), 32)
    high = tl.minimum(tl.maximum((end + L_SEL - 1) // L_SEL - word * 32, 0), 32)
    one = tl.full((TOKENS, PLACES), 1, tl.int64)
    mine = tl.where(high > low, (one << high.to(tl.int64)) - (one << low.to(tl.int64)), 0)
    to = bits + (pair * n_words + word) * seq_len + token
    tl.store(to, tl.sum(mine, 1).to(tl.int32), mask=token < seq_len)


@triton.jit
def _ones(word):
    """How many bits of an int32 are set: sums of 2, 4, 8, 16 and 32 neighbors."""
    word = (word & 0x55555555) + ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word & 0x0F0F0F0F) + ((word >> 4) & 0x0F0F0F0F)
    word = (word & 0x00FF00FF) + ((word >> 8) & 0x00FF00FF)
    return (word & 0x0000FFFF) + ((word >> 16) & 0x0000FFFF)


@triton.jit
def place_kernel(
    bits, before, read, begin, end, seq_len, n_words, TOKENS: tl.constexpr
):  # fmt: skip
    """How many blocks each query of a run reads: before each word, and in all.

    before int8 [B*G, words, end - begin]; read int32 [B*G, end - begin].
    """
    pair = tl.program_id(1).to(tl.int64)
    token = begin + tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = token < end
    total = tl.zeros((TOKENS,), tl.int32)
    for word in range(n_words):
        of_word = pair * n_words + word
        tl.store(before + of_word * (end - begin) + token - begin, total.to(tl.int8), mask=inside)
        total += _ones(tl.load(bits + of_word * seq_len + token, mask=inside, other=0))
    tl.store(read + pair * (end - begin) + token - begin, total, mask=inside)


@triton.jit
def list_kernel(
    bits, before, counts, offsets, readers, begin, end, seq_len, n_words, n_blocks, list_len,
    L_SEL: tl.constexpr, TOKENS: tl.constexpr, FILL: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """The queries that read one block, ascending: how many (counts), or (FILL) their list.

    counts, offsets int32 [B*G, n_blocks]; readers int32 [B*G, list_len]. before: of `place_kernel`;
    with PLACES = 1 nothing is read of it.
    """
    block = tl.program_id(0)
    pair = tl.program_id(1).to(tl.int64)
    of_word = pair * n_words + block // 32
    row = bits + of_word * seq_len
    lower = (tl.full((), -1, tl.int32) << (block % 32)) ^ -1
    base = tl.full((), 0, tl.int32)
    if FILL:
        base = tl.load(offsets + pair * n_blocks + block)
    # No query before a block's first token reads it.
    for first in range(tl.maximum(block * L_SEL, begin), end, TOKENS):
        token = first + tl.arange(0, TOKENS)
        words = tl.load(row + token, mask=token < end, other=0)
        reads = (words >> (block % 32)) & 1
        if FILL:
            to = base + tl.cumsum(reads, 0) - reads
            entry = token
            if PLACES > 1:
                at = before + of_word * (end - begin) + token - begin
                others = tl.load(at, mask=token < end, other=0).to(tl.int32)
                entry = token * PLACES + others + _ones(words & lower)
            tl.store(readers + pair * list_len + to, entry, mask=reads > 0)
        base += tl.sum(reads, 0)
    if not FILL:
        tl.store(counts + pair * n_blocks + block, base)
