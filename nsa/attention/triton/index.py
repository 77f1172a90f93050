"""Kernels: which blocks each query reads, as bits, and which queries read each block, as lists.

bits int32 [B*G, words, S]: bit b of word w says whether the query reads block 32*w + b. Tokens lie
innermost, so that neighboring queries are neighboring addresses. Neither has S x S/l_sel entries.
"""

import triton
import triton.language as tl


@triton.jit
def pack_kernel(
    ranges, bits, seq_len, n_words, L_SEL: tl.constexpr, N_SEL: tl.constexpr,
    PLACES: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Bits of one word for a run of queries, from their token ranges [B*G, S, N_SEL, 2]."""
    pair = tl.program_id(1).to(tl.int64)
    word = tl.program_id(2)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    place = tl.arange(0, PLACES)
    inside = (token < seq_len)[:, None] & (place < N_SEL)[None, :]
    at = ((pair * seq_len + token.to(tl.int64))[:, None] * N_SEL + place[None, :]) * 2
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
def list_kernel(
    bits, counts, offsets, readers, seq_len, n_words, n_blocks, list_len, L_SEL: tl.constexpr,
    TOKENS: tl.constexpr, FILL: tl.constexpr,
):  # fmt: skip
    """The queries that read one block, ascending: how many (counts), or (FILL) their list.

    counts, offsets int32 [B*G, n_blocks]; readers int32 [B*G, list_len].
    """
    block = tl.program_id(0)
    pair = tl.program_id(1).to(tl.int64)
    row = bits + (pair * n_words + block // 32) * seq_len
    base = tl.full((), 0, tl.int32)
    if FILL:
        base = tl.load(offsets + pair * n_blocks + block)
    # No query before a block's first token reads it.
    for first in range(block * L_SEL, seq_len, TOKENS):
        token = first + tl.arange(0, TOKENS)
        words = tl.load(row + token, mask=token < seq_len, other=0)
        reads = (words >> (block % 32)) & 1
        if FILL:
            to = base + tl.cumsum(reads, 0) - reads
            tl.store(readers + pair * list_len + to, token, mask=reads > 0)
        base += tl.sum(reads, 0)
    if not FILL:
        tl.store(counts + pair * n_blocks + block, base)
