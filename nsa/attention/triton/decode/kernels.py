"""Kernels of decoding: one new token on a cache, its compressed, selected and window reads.

What is read is cut into parts, so that one token fills a device: a program attends to one part, and
leaves its largest score, sum and output; others put parts together in their order. First the
compressed keys, whose scores are kept; from them one program of each kv group chooses the blocks;
then each selected block and each piece of the window is a part; last the branches are put together
and gated. ROWS holds the query heads of a group, filled up to what tensor cores multiply.
"""

import triton
import triton.language as tl

from nsa.attention.triton.rows import NOTHING, load_rows
from nsa.attention.triton.window.rows import load_keys


@triton.jit
def _attend(best, total, acc, queries, keys, values, seen, scale):
    """Keys that are `seen` in the running softmax; the scores to the base 2 beside it."""
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
    scores = tl.where(seen[None, :], scores, NOTHING)
    higher = tl.maximum(best, tl.max(scores, 1))
    shift = tl.where(higher == NOTHING, 0.0, higher)
    p = tl.exp2(scores - shift[:, None])
    keep = tl.exp2(best - shift)
    acc = tl.dot(p.to(values.dtype), values, acc * keep[:, None], input_precision="ieee")
    return higher, total * keep + tl.sum(p, 1), acc, scores


@triton.jit
def _leave(
    parts, bests, totals, pair, part, n_parts, best, total, acc, ROWS: tl.constexpr,
    WIDTH_V: tl.constexpr,
):  # fmt: skip
    """Store a part: output [ROWS, WIDTH_V] before its division, largest score and sum [ROWS]."""
    head, dim = tl.arange(0, ROWS), tl.arange(0, WIDTH_V)
    to = ((pair * n_parts + part) * ROWS + head) * WIDTH_V
    tl.store(parts + to[:, None] + dim[None, :], acc)
    # Parts lie innermost here: those of a head are read together.
    to = (pair * ROWS + head) * n_parts + part
    tl.store(bests + to, best)
    tl.store(totals + to, total)


@triton.jit
def _queries(
    q, q_b, q_h, batch, group, HEADS: tl.constexpr, D_K: tl.constexpr, WIDTH_K: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    head = tl.arange(0, ROWS)
    return load_rows(
        q + batch * q_b, 0, q_h, head * 0, group * HEADS + head, head < HEADS, D_K, WIDTH_K
    )  # fmt: skip


@triton.jit
def compressed_parts_kernel(
    q, k_cmp, v_cmp, scores, parts, bests, totals, groups, n_keys, n_parts, per_part, scale,
    q_b, q_h, k_b, k_t, k_g, v_b, v_t, v_g,
    HEADS: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, WIDTH_K: tl.constexpr,
    WIDTH_V: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One part of the compressed keys, and the scores of its keys [B*G, HEADS, n_keys]."""
    part = tl.program_id(0)
    pair = tl.program_id(1).to(tl.int64)
    batch, group = pair // groups, pair % groups
    k_cmp += batch * k_b + group * k_g
    v_cmp += batch * v_b + group * v_g
    queries = _queries(q, q_b, q_h, batch, group, HEADS, D_K, WIDTH_K, ROWS)
    queries = queries.to(k_cmp.dtype.element_ty)
    best = tl.full((ROWS,), NOTHING, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, WIDTH_V), tl.float32)
    head = tl.arange(0, ROWS)
    to = scores + (pair * HEADS + head)[:, None] * n_keys
    end = tl.minimum((part + 1) * per_part, n_keys)
    for first in range(part * per_part, end, KEYS):
        keys = load_keys(k_cmp, k_t, first, n_keys, KEYS, D_K, WIDTH_K)
        values = load_keys(v_cmp, v_t, first, n_keys, KEYS, D_V, WIDTH_V)
        key = first + tl.arange(0, KEYS)
        best, total, acc, mine = _attend(
            best, total, acc, queries, keys, values, key < end, scale
        )  # fmt: skip
        tl.store(to + key[None, :], mine, (head < HEADS)[:, None] & (key < end)[None, :])
    _leave(parts, bests, totals, pair, part, n_parts, best, total, acc, ROWS, WIDTH_V)


@triton.jit
def choose_kernel(
    scores, bests, totals, blocks, n_keys, n_parts, n_compressed, current,
    HEADS: tl.constexpr, PER_BLOCK: tl.constexpr, PER_SEL: tl.constexpr, N_SEL: tl.constexpr,
    LOCAL: tl.constexpr, PARTS: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The blocks of one kv group, int32 [B*G, N_SEL]: forced ones first, then by importance.

    Equations 8 to 10: probabilities of the compressed keys, summed where they overlap a block, and
    over heads. current: the token's own block. Ties go to the lower index; -1 where none is left.
    """
    pair = tl.program_id(0).to(tl.int64)
    block, part = tl.arange(0, BLOCKS), tl.arange(0, PARTS)
    found = tl.zeros((BLOCKS,), tl.float32)
    for head in range(HEADS):
        at = (pair * ROWS + head) * n_parts + part
        best = tl.load(bests + at, part < n_compressed, NOTHING)
        top = tl.max(best, 0)
        top = tl.where(top == NOTHING, 0.0, top)
        total = tl.sum(tl.load(totals + at, part < n_compressed, 0.0) * tl.exp2(best - top), 0)
        of_head = scores + (pair * HEADS + head) * n_keys
        for place in tl.static_range(PER_BLOCK + PER_SEL - 1):
            # The block's first unit less this is the compressed key's: so many units are shared.
            offset = place - PER_BLOCK + 1
            shared = tl.minimum(place + 1, PER_SEL) - tl.maximum(offset, 0)
            key = block * PER_SEL + offset
            seen = (key >= 0) & (key < n_keys)
            p = tl.exp2(tl.load(of_head + key, seen, NOTHING) - top)
            found += p / tl.where(total == 0.0, 1.0, total) * shared
    forced = (block == 0) | (current - block < LOCAL)
    found = tl.where(forced, float("inf"), found)
    found = tl.where(block > current, NOTHING, found)
    for place in range(N_SEL):
        highest = tl.max(found, 0)
        taken = tl.min(tl.where(found == highest, block, BLOCKS), 0)
        tl.store(blocks + pair * N_SEL + place, tl.where(highest == NOTHING, -1, taken))
        found = tl.where(block == taken, NOTHING, found)


@triton.jit
def read_kernel(
    q, k_sel, v_sel, k_win, v_win, blocks, parts, bests, totals, groups, length, n_near, first_part,
    n_parts, scale,
    q_b, q_h, ks_b, ks_t, ks_g, vs_b, vs_t, vs_g, kw_b, kw_t, kw_g, vw_b, vw_t, vw_g,
    HEADS: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, WIDTH_K: tl.constexpr,
    WIDTH_V: tl.constexpr, L_SEL: tl.constexpr, N_SEL: tl.constexpr, KEYS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """One selected block, or KEYS keys of the window. length, n_near: tokens of cache, window."""
    number = tl.program_id(0)
    pair = tl.program_id(1).to(tl.int64)
    batch, group = pair // groups, pair % groups
    queries = _queries(q, q_b, q_h, batch, group, HEADS, D_K, WIDTH_K, ROWS)
    inner = tl.arange(0, KEYS)
    if number < N_SEL:
        block = tl.load(blocks + pair * N_SEL + number)
        # Without a block the part is beyond the end: it holds nothing.
        first = tl.where(block < 0, length, block * L_SEL)
        keys = load_keys(
            k_sel + batch * ks_b + group * ks_g, ks_t, first, length, KEYS, D_K, WIDTH_K
        )  # fmt: skip
        values = load_keys(
            v_sel + batch * vs_b + group * vs_g, vs_t, first, length, KEYS, D_V, WIDTH_V
        )  # fmt: skip
        seen = (first + inner < length) & (inner < L_SEL)
    else:
        first = (number - N_SEL) * KEYS
        keys = load_keys(
            k_win + batch * kw_b + group * kw_g, kw_t, first, n_near, KEYS, D_K, WIDTH_K
        )  # fmt: skip
        values = load_keys(
            v_win + batch * vw_b + group * vw_g, vw_t, first, n_near, KEYS, D_V, WIDTH_V
        )  # fmt: skip
        seen = first + inner < n_near
    best, total, acc, _ = _attend(
        tl.full((ROWS,), NOTHING, tl.float32), tl.zeros((ROWS,), tl.float32),
        tl.zeros((ROWS, WIDTH_V), tl.float32), queries, keys, values, seen, scale,
    )  # fmt: skip
    _leave(parts, bests, totals, pair, first_part + number, n_parts, best, total, acc, ROWS,
           WIDTH_V)  # fmt: skip


@triton.jit
def _together(
    parts, bests, totals, pair, begin, end, n_parts, ROWS: tl.constexpr, WIDTH_V: tl.constexpr
):  # fmt: skip
    """A branch's output [ROWS, WIDTH_V] from its parts, in order; zeros where it sees nothing."""
    head, dim = tl.arange(0, ROWS), tl.arange(0, WIDTH_V)
    best = tl.full((ROWS,), NOTHING, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, WIDTH_V), tl.float32)
    for part in range(begin, end):
        at = (pair * ROWS + head) * n_parts + part
        other = tl.load(bests + at)
        higher = tl.maximum(best, other)
        shift = tl.where(higher == NOTHING, 0.0, higher)
        mine, theirs = tl.exp2(best - shift), tl.exp2(other - shift)
        of_part = ((pair * n_parts + part) * ROWS + head) * WIDTH_V
        read = tl.load(parts + of_part[:, None] + dim[None, :])
        acc = acc * mine[:, None] + read * theirs[:, None]
        total = total * mine + tl.load(totals + at) * theirs
        best = higher
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def finish_kernel(
    parts, bests, totals, gates, out, groups, n_compressed, n_parts, g_b, g_h,
    HEADS: tl.constexpr, D_V: tl.constexpr, WIDTH_V: tl.constexpr, N_SEL: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """out [B,1,G*HEADS,D_V] of one kv group: the branches, each times its gate (equation 5)."""
    pair = tl.program_id(0).to(tl.int64)
    batch, group = pair // groups, pair % groups
    head, dim = tl.arange(0, ROWS), tl.arange(0, WIDTH_V)
    inside = head < HEADS
    at = gates + batch * g_b + (group * HEADS + head) * g_h
    chosen = n_compressed + N_SEL
    acc = tl.zeros((ROWS, WIDTH_V), tl.float32)
    for branch in tl.static_range(3):
        begin = 0 if branch == 0 else (n_compressed if branch == 1 else chosen)
        end = n_compressed if branch == 0 else (chosen if branch == 1 else n_parts)
        gate = tl.load(at + branch, inside, 0.0).to(tl.float32)
        acc += gate[:, None] * _together(
            parts, bests, totals, pair, begin, end, n_parts, ROWS, WIDTH_V
        )  # fmt: skip
    to = out + (pair * HEADS + head)[:, None] * D_V + dim[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), inside[:, None] & (dim < D_V)[None, :])
