"""Kernel: the blocks that the heads of a group select for each token (equations 9 to 11).

A second pass over the compressed keys, with the exact log-sum-exp of the first. The score of
selection block j is a sum over the compressed keys that overlap it, from j*STEP + 1 - L/STRIDE to
j*STEP + STEP - 1, and over the heads. A tile of tokens walks over runs of blocks: each product is
of one head and all keys that begin in the run. Probabilities of all heads are added first, then
those of a block's keys; what keys give to a later block than the one they begin in is moved on to
it. So each key is multiplied once, each block adds the same terms in the same order, and equal
probabilities give equal scores.

The best N_SEL so far are kept, in no order. The best block of a run takes the place of the worst
one that is kept, as long as it is better for any token of the tile: rarely, once there are many
blocks. Runs ascend, so that of equal scores those with lower indices stay. Nothing has
S x S/l_sel numbers.
"""

import triton
import triton.language as tl

from nsa.attention.triton import steps_of as _steps_of
from nsa.attention.triton.compressed.rows import exact_dot, load_terms, rounded_dot, seen_keys
from nsa.attention.triton.rows import NOTHING, load_rows, padded
from nsa.config import FORCED_INITIAL_BLOCKS, FORCED_LOCAL_BLOCKS

_INITIAL, _LOCAL = tl.constexpr(FORCED_INITIAL_BLOCKS), tl.constexpr(FORCED_LOCAL_BLOCKS)
# Beyond every index of a block.
_NO_BLOCK = tl.constexpr(2147483647)
steps_of = triton.constexpr_function(_steps_of)


@triton.constexpr_function
def reach_of(l, stride, l_sel):  # noqa: E741
    """Later selection blocks that a compressed key reaches into, at most."""
    return (l_sel // stride + l // stride - 2) // (l_sel // stride)


@triton.constexpr_function
def reaches_of(l, stride, l_sel):  # noqa: E741
    """Room for them: a power of two."""
    return triton.next_power_of_2(max(1, reach_of(l, stride, l_sel)))


@triton.jit
def _probabilities(
    q, lse, terms, token, inside, key, seen, heads, n_keys, scale, q_t, q_h, k_t, D_K: tl.constexpr,
    TERMS: tl.constexpr,
):  # fmt: skip
    """Of keys [KEYS], added up over the heads [TOKENS, KEYS]; 0 where not `seen`."""
    keys = load_terms(terms, k_t, key, n_keys, D_K, TERMS)
    total = tl.zeros(seen.shape, tl.float32)
    for head in range(heads):
        queries = load_rows(q, q_t, q_h, token, head, inside, D_K)
        sums = tl.load(lse + token.to(tl.int64) * heads + head, inside, 0.0)
        exact = exact_dot(rounded_dot(queries, keys), queries, keys, TERMS)
        total += tl.exp2(exact * scale - sums[:, None])
    # What is not seen may be infinite here, or not a number.
    return tl.where(seen, total, 0.0)


@triton.jit
def _shared(
    p, offset, blocks_later: tl.constexpr, L: tl.constexpr, STRIDE: tl.constexpr,
    L_SEL: tl.constexpr, TOKENS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """What each block's keys give to the block that comes so many later [TOKENS, BLOCKS]."""
    begins = offset - blocks_later * (L_SEL // STRIDE)
    # How many strides key and block share.
    weight = tl.minimum(begins + L // STRIDE, L_SEL // STRIDE) - tl.maximum(begins, 0)
    weight = tl.maximum(weight, 0).to(tl.float32)
    of_blocks = tl.reshape(p * weight[None, :], (TOKENS, BLOCKS, steps_of(L_SEL, STRIDE)))
    return tl.sum(of_blocks, 2)


@triton.jit
def _scores(
    p, offset, carry, L: tl.constexpr, STRIDE: tl.constexpr, L_SEL: tl.constexpr,
    TOKENS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Importance [TOKENS, BLOCKS] of a run of blocks by the probabilities of their keys.

    carry [TOKENS, REACHES]: what the run before gives to the first block of this one, by how many
    blocks later that is; and the same of this run.
    """
    REACH: tl.constexpr = reach_of(L, STRIDE, L_SEL)
    block, reach = tl.arange(0, BLOCKS), tl.arange(0, carry.shape[1])
    next_one = (block[:, None] + 1 == block[None, :])[None, :, :]
    moved = tl.zeros((TOKENS, BLOCKS), tl.float32)
    # From afar one block at a time: what is given to the next but one is moved on with its own.
    for nearer in tl.static_range(REACH):
        given = _shared(p, offset, REACH - nearer, L, STRIDE, L_SEL, TOKENS, BLOCKS) + moved
        here = (reach == REACH - nearer - 1)[None, :]
        first = tl.sum(tl.where(here, carry, 0.0), 1)
        last = tl.sum(tl.where((block == BLOCKS - 1)[None, :], given, 0.0), 1)
        carry = tl.where(here, last[:, None], carry)
        # A sum of one number and zeros. tl.gather would spread a token over 16 threads, here
        # and wherever blocks are compared.
        shifted = tl.sum(tl.where(next_one, given[:, :, None], 0.0), 1)
        moved = tl.where((block == 0)[None, :], first[:, None], shifted)
    return _shared(p, offset, 0, L, STRIDE, L_SEL, TOKENS, BLOCKS) + moved, carry


@triton.jit
def _insert(best, held, scores, block):
    """The best scores [TOKENS, PLACES] and their blocks, once those of a run [BLOCKS] are in."""
    highest, lowest = tl.max(scores, 1), tl.min(best, 1)
    while tl.max((highest > lowest).to(tl.int32), 0) > 0:
        # Of equal scores the first one enters, and the last one leaves.
        enters = tl.min(tl.where(scores == highest[:, None], block[None, :], _NO_BLOCK), 1)
        leaves = tl.max(tl.where(best == lowest[:, None], held, -1), 1)
        change = (held == leaves[:, None]) & (highest > lowest)[:, None]
        best = tl.where(change, highest[:, None], best)
        held = tl.where(change, enters[:, None], held)
        scores = tl.where(block[None, :] == enters[:, None], NOTHING, scores)
        highest, lowest = tl.max(scores, 1), tl.min(best, 1)
    return best, held


@triton.jit
def top_kernel(
    q, terms, lse, blocks, bits, seq_len, groups, heads, n_keys, n_words, scale,
    q_b, q_t, q_g, q_h, k_b, k_t, k_g,
    D_K: tl.constexpr, L: tl.constexpr, STRIDE: tl.constexpr, TERMS: tl.constexpr,
    L_SEL: tl.constexpr, N_SEL: tl.constexpr, TOKENS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Blocks int64 [B,S,G,N_SEL] of a run of tokens, ascending, -1 at the end for none.

    And the same as bits int32 [B*G, n_words, S], as `selected.readers` has them.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    pair = tl.program_id(1).to(tl.int64)
    batch, group = pair // groups, pair % groups
    token = tile * TOKENS + tl.arange(0, TOKENS)
    inside = token < seq_len
    current = token // L_SEL
    last = tl.minimum(tile * TOKENS + TOKENS, seq_len) - 1
    place = tl.arange(0, padded(N_SEL))
    if last < N_SEL * L_SEL:
        # All that is visible.
        found = tl.where(place[None, :] <= current[:, None], place[None, :], _NO_BLOCK)
    else:
        q += batch * q_b + group * q_g
        terms += batch * k_b + group * k_g
        lse += pair * seq_len * heads
        # Nothing yet: worse than any score. Places beyond N_SEL are never left.
        empty = tl.where(place < N_SEL, -1.0, float("inf"))
        best = tl.zeros((TOKENS, padded(N_SEL)), tl.float32) + empty[None, :]
        # No two places hold the same, and none a block.
        held = tl.zeros((TOKENS, padded(N_SEL)), tl.int32) + (place ^ _NO_BLOCK)[None, :]
        carry = tl.zeros((TOKENS, reaches_of(L, STRIDE, L_SEL)), tl.float32)
        steps: tl.constexpr = steps_of(L_SEL, STRIDE)
        column = tl.arange(0, BLOCKS * steps)
        offset = column % steps
        for first in range(0, last // L_SEL + 1, BLOCKS):
            key = (first + column // steps) * (L_SEL // STRIDE) + offset
            seen = seen_keys(token, key, L, STRIDE) & (offset < L_SEL // STRIDE)[None, :]
            p = _probabilities(
                q, lse, terms, token, inside, key, seen, heads, n_keys, scale, q_t, q_h, k_t, D_K,
                TERMS,
            )  # fmt: skip
            scores, carry = _scores(p, offset, carry, L, STRIDE, L_SEL, TOKENS, BLOCKS)
            block = first + tl.arange(0, BLOCKS)
            age = current[:, None] - block[None, :]
            forced = (block < _INITIAL)[None, :] | (age < _LOCAL)
            scores = tl.where(forced, float("inf"), scores)
            best, held = _insert(best, held, tl.where(age >= 0, scores, NOTHING), block)
        found = tl.where((best >= 0.0) & (place < N_SEL)[None, :], held, _NO_BLOCK)
        found = tl.sort(found, 1)
    for word in range(n_words):
        mine = tl.where(found // 32 == word, 1 << (found % 32), 0)
        to = bits + (pair * n_words + word) * seq_len + token
        tl.store(to, tl.sum(mine, 1), inside)
    far = (batch * seq_len + token.to(tl.int64)) * groups + group
    found = tl.where(found == _NO_BLOCK, -1, found).to(tl.int64)
    to = blocks + (far * N_SEL)[:, None] + place[None, :]
    tl.store(to, found, inside[:, None] & (place < N_SEL)[None, :])
