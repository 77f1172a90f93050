"""Kernel: the blocks that the heads of a group select for each token (equations 9 to 11).

A second pass over the compressed keys, with the exact log-sum-exp of the first. The score of
selection block j is a sum over the compressed blocks j*STEP + offset that overlap it, offset
running from 1 - L/STRIDE to STEP - 1: for each offset and head one product scores a run of blocks
at once, so that each adds the same terms in the same order and equal probabilities give equal
scores. The best N_SEL so far are kept sorted, as one number each: the bits of the score, which
order like floats that are not negative, above the index, smaller ones first. Nothing has
S x S/l_sel numbers.
"""

import triton
import triton.language as tl

from nsa.attention.triton.compressed_rows import exact_dot, rounded_dot, seen_keys
from nsa.attention.triton.rows import NOTHING

# Beyond every index of a block.
_NO_BLOCK = tl.constexpr(2147483647)


@triton.jit
def _scores(
    first, token, inside, q, k, lse, n_keys, scale, q_t, q_h, k_t,
    HEADS: tl.constexpr, D_K: tl.constexpr, WIDTH_K: tl.constexpr, L: tl.constexpr,
    STRIDE: tl.constexpr, STEP: tl.constexpr, TERMS: tl.constexpr, TOKENS: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Importance [TOKENS, BLOCKS] of the blocks from `first` on, over all heads of the group."""
    block, dim = first + tl.arange(0, BLOCKS), tl.arange(0, WIDTH_K)
    far = token.to(tl.int64)
    scores = tl.zeros((TOKENS, BLOCKS), tl.float32)
    for head in range(HEADS):
        at = q + far * q_t + head * q_h
        of_q = inside[:, None] & (dim < D_K)[None, :]
        queries = tl.load(at[:, None] + dim[None, :], of_q, 0.0)
        sums = tl.load(lse + far * HEADS + head, inside, 0.0)
        for offset in range(1 - L // STRIDE, STEP):
            # How many strides the two blocks share.
            weight = tl.minimum(offset + L // STRIDE, STEP) - tl.maximum(offset, 0)
            key = block * STEP + offset
            of_k = ((key >= 0) & (key < n_keys))[:, None] & (dim < D_K)[None, :]
            keys = tl.load(k + key.to(tl.int64)[:, None] * k_t + dim[None, :], of_k, 0.0)
            seen = seen_keys(token, key, L, STRIDE)
            exact = exact_dot(rounded_dot(queries, keys), queries, keys, TERMS)
            logits = exact * scale - sums[:, None]
            scores += weight.to(tl.float32) * tl.exp2(tl.where(seen, logits, NOTHING))
    return scores


@triton.jit
def top_kernel(
    q, k, lse, blocks, seq_len, groups, n_keys, scale,
    q_b, q_t, q_g, q_h, k_b, k_t, k_g,
    HEADS: tl.constexpr, D_K: tl.constexpr, WIDTH_K: tl.constexpr, L: tl.constexpr,
    STRIDE: tl.constexpr, STEP: tl.constexpr, TERMS: tl.constexpr, L_SEL: tl.constexpr,
    N_SEL: tl.constexpr, PLACES: tl.constexpr, INITIAL: tl.constexpr, LOCAL: tl.constexpr,
    TOKENS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Blocks int64 [B,S,G,N_SEL] of a run of tokens, ascending, -1 at the end for none."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    pair = tl.program_id(1).to(tl.int64)
    batch, group = pair // groups, pair % groups
    token = tile * TOKENS + tl.arange(0, TOKENS)
    inside = token < seq_len
    current = token // L_SEL
    last = tl.minimum(tile * TOKENS + TOKENS, seq_len) - 1
    place = tl.arange(0, PLACES)
    if last < N_SEL * L_SEL:
        # All that is visible.
        found = tl.where(place[None, :] <= current[:, None], place[None, :], _NO_BLOCK)
    else:
        q += batch * q_b + group * q_g
        k += batch * k_b + group * k_g
        lse += pair * seq_len * HEADS
        best = tl.full((TOKENS, PLACES), -1, tl.int64)
        for first in range(0, last // L_SEL + 1, BLOCKS):
            scores = _scores(
                first, token, inside, q, k, lse, n_keys, scale, q_t, q_h, k_t,
                HEADS, D_K, WIDTH_K, L, STRIDE, STEP, TERMS, TOKENS, BLOCKS,
            )  # fmt: skip
            block = first + tl.arange(0, BLOCKS)
            age = current[:, None] - block[None, :]
            forced = (block < INITIAL)[None, :] | (age < LOCAL)
            order = tl.where(forced, float("inf"), scores).to(tl.int32, bitcast=True).to(tl.int64)
            order = (order << 32) + (block ^ _NO_BLOCK)[None, :]
            order = tl.where(age >= 0, order, -1)
            # One ascends, the other descends: the larger at each place are the best of both.
            best = tl.sort(tl.maximum(best, tl.topk(order, PLACES)), 1)
        index = ((best & _NO_BLOCK) ^ _NO_BLOCK).to(tl.int32)
        found = tl.where((best >= 0) & (place >= PLACES - N_SEL)[None, :], index, _NO_BLOCK)
        found = tl.sort(found, 1)
    far = (batch * seq_len + token.to(tl.int64)) * groups + group
    found = tl.where(found == _NO_BLOCK, -1, found).to(tl.int64)
    to = blocks + (far * N_SEL)[:, None] + place[None, :]
    tl.store(to, found, inside[:, None] & (place < N_SEL)[None, :])
