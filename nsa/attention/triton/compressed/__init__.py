"""The choice of blocks, the kernel that owns compressed keys, and what starts the branch.

`compressed_piece_kernel`: the gradients of keys need no atomic operation. A compressed key is seen
by every token after it. The tokens are cut into pieces: a program adds up one piece for a tile of
keys, and `sums_kernel` adds the pieces in order. Every number has one program that writes it, so
that equal inputs give equal bits.

`top_kernel`: the blocks that the heads of a group select for each token (equations 9 to 11). It is
a second pass over the compressed keys, with the exact log-sum-exp of the first. The score of
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

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.attention.triton import LEAST, TERMS, CompressedCut, launch, room_for_bits
from nsa.attention.triton import steps_of as _steps_of
from nsa.attention.triton.compressed.rows import (
    compressed_kernel,
    exact_dot,
    load_terms,
    rounded_dot,
    seen_keys,
)
from nsa.attention.triton.rows import (
    NOTHING,
    give_keys,
    load_keys,
    load_rows,
    padded,
    store_part,
)
from nsa.config import FORCED_INITIAL_BLOCKS, FORCED_LOCAL_BLOCKS, NSAConfig

# Tokens that a program of pooling reads at once: a block of the production shape.
TOKENS = 32
_INITIAL, _LOCAL = tl.constexpr(FORCED_INITIAL_BLOCKS), tl.constexpr(FORCED_LOCAL_BLOCKS)
# Beyond every index of a block.
_NO_BLOCK = tl.constexpr(2147483647)
steps_of = triton.constexpr_function(_steps_of)


@triton.jit
def _add(
    dk, dv, keys, values, key, first, end, q, grad, lse, delta, seq_len, groups, batch, group,
    scale, q_t, q_h, HEADS: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, L: tl.constexpr,
    STRIDE: tl.constexpr, ROWS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """What ROWS rows more add to the gradients of keys [KEYS, WIDTH_K] and values."""
    row = first + tl.arange(0, ROWS)
    inside = row < end
    # Rows beyond the piece have gradients and delta 0: they add nothing.
    token, head = row // HEADS, row % HEADS
    queries = load_rows(q, q_t, q_h, token, head, inside, D_K)
    step = groups * HEADS * D_V
    theirs = grad + (batch * seq_len * groups + group) * HEADS * D_V
    grads = load_rows(theirs, step, D_V, token, head, inside, D_V)
    sums = tl.load(lse + row, inside, 0.0)
    mine = tl.load(delta + row, inside, 0.0)
    scores = tl.dot(keys, tl.trans(queries), input_precision="ieee")
    p = tl.exp2(scores * scale - sums[None, :])
    if MASKED:
        p = tl.where(tl.trans(seen_keys(token, key, L, STRIDE)), p, 0.0)
    return give_keys(dk, dv, p, queries, grads, values, mine)


@triton.jit
def compressed_piece_kernel(
    q, k, v, rounded_grad, lse, delta, parts, seq_len, groups, n_keys, n_pieces, scale,
    q_b, q_t, q_g, q_h, k_b, k_t, k_g, v_b, v_t, v_g,
    HEADS: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, L: tl.constexpr,
    STRIDE: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """dK and dV of KEYS keys by PIECE tokens: float32 [KEYS, WIDTH_K + WIDTH_V].

    k, v, rounded_grad: rounded to the queries' type.
    """
    piece, tile = tl.program_id(0), tl.program_id(1)
    pair = tl.program_id(2).to(tl.int64)
    batch, group = pair // groups, pair % groups
    # No token before the end of the first key sees one of them; all see the last one from its end.
    start = tl.maximum(piece * PIECE, tile * KEYS * STRIDE + L - 1)
    whole = (tile * KEYS + KEYS - 1) * STRIDE + L - 1
    stop = tl.minimum(piece * PIECE + PIECE, seq_len)
    if start < stop:
        q += batch * q_b + group * q_g
        k += batch * k_b + group * k_g
        v += batch * v_b + group * v_g
        lse += pair * seq_len * HEADS
        delta += pair * seq_len * HEADS
        keys = load_keys(k, k_t, tile * KEYS, n_keys, KEYS, D_K)
        values = load_keys(v, v_t, tile * KEYS, n_keys, KEYS, D_V)
        dk = tl.zeros((KEYS, padded(D_K)), tl.float32)
        dv = tl.zeros((KEYS, padded(D_V)), tl.float32)
        key = tile * KEYS + tl.arange(0, KEYS)
        begin, end = start * HEADS, stop * HEADS
        masked = begin + tl.cdiv(tl.maximum(whole - start, 0) * HEADS, ROWS) * ROWS
        for see_all in tl.static_range(2):
            low, high = (masked, end) if see_all else (begin, tl.minimum(masked, end))
            for first in range(low, high, ROWS):
                dk, dv = _add(
                    dk, dv, keys, values, key, first, end, q, rounded_grad, lse, delta, seq_len,
                    groups, batch, group, scale, q_t, q_h, HEADS, D_K, D_V, L, STRIDE, ROWS,
                    not see_all,
                )  # fmt: skip
        of_tile = (pair * tl.num_programs(1) + tile) * n_pieces + piece
        store_part(parts, of_tile, dk, dv, KEYS, D_K, D_V)


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


def attend(
    q: Tensor, terms: Tensor, values: Tensor, cfg: NSAConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Output float32 [B,S,G,h,Dv] and two log-sum-exps to the base 2 [B*G, S*h] of q [B,S,G,h,Dk].

    terms, values: as `pool` makes them. The first log-sum-exp is of keys rounded to the type of q,
    for the gradients, the last of exact ones, for `top_blocks`.
    """
    batch, seq_len, groups, heads = q.shape[:4]
    out, lse = launch.results_of(q, cfg, torch.float32)
    q = launch.inner(q)
    exact_lse = torch.empty_like(lse)
    cut: CompressedCut = launch.cut_of("compressed", q, cfg)
    with launch.device_of(q):
        compressed_kernel[triton.cdiv(seq_len * heads, cut.forward.rows), batch * groups](
            q, terms, values, out, lse, exact_lse, seq_len, groups, terms.shape[1],
            launch.scale_of(cfg), *launch.strides_of(q, terms, values),
            **compressed_constants(cfg), TERMS=n_terms(q.dtype), KEYS=cut.keys,
            **launch.how(cut.forward),
        )  # fmt: skip
    return out, lse, exact_lse


def give_keys_of_compressed(
    q: Tensor, rounded: Tensor, values: Tensor, grad: Tensor, lse: Tensor, delta: Tensor,
    cfg: NSAConfig, cut: CompressedCut,
) -> Tensor:  # fmt: skip
    """Start the kernel that owns compressed keys; parts [B*G, tiles, pieces, keys, widths]."""
    seq_len, groups, n_keys = q.shape[1], q.shape[2], rounded.shape[1]
    pairs, n_tiles, n_pieces = q.shape[0] * groups, cut.n_tiles(n_keys), cut.n_pieces(seq_len)
    parts_shape = (pairs, n_tiles, n_pieces, cut.owned, padded(cfg.d_k) + padded(cfg.d_v))
    parts = torch.empty(parts_shape, dtype=torch.float32, device=q.device)
    if n_keys:
        compressed_piece_kernel[n_pieces, n_tiles, pairs](
            q, rounded, values, grad, lse, delta, parts, seq_len, groups, n_keys, n_pieces,
            launch.scale_of(cfg), *launch.strides_of(q, rounded, values),
            **compressed_constants(cfg), KEYS=cut.owned, PIECE=cut.piece,
            **launch.how(cut.key_gradient),
        )  # fmt: skip
    return parts


def programs_of_sum(n_tokens: int, cfg: NSAConfig) -> int:
    """Of a pair, that add up the parts for so many tokens."""
    programs: int = triton.cdiv(n_tokens, LEAST * pooled(cfg)[1])
    return programs


def top_blocks(q: Tensor, terms: Tensor, lse: Tensor, cfg: NSAConfig) -> tuple[Tensor, Tensor]:
    """Blocks int64 [B,S,G,n_sel] that q [B,S,G,h,Dk] selects by compressed keys, and their bits.

    Bits int32 [B*G, words, S]: of word w, bit b of a token says whether it selects 32*w + b.
    lse: the exact one.
    """
    batch, seq_len, groups = q.shape[:3]
    q = launch.inner(q)
    shape = (batch, seq_len, groups, cfg.n_sel)
    blocks = torch.empty(shape, dtype=torch.int64, device=q.device)
    bits = room_for_bits(q, cfg.l_sel)
    cut: CompressedCut = launch.cut_of("top", q, cfg)
    tile = launch.how(cut.top)
    with launch.device_of(q):
        top_kernel[triton.cdiv(seq_len, cut.top.rows), batch * groups](
            q, terms, lse, blocks, bits, seq_len, groups, q.shape[3], terms.shape[1], bits.shape[1],
            launch.scale_of(cfg), *q.stride()[:4], *terms.stride()[:3],
            **top_constants(cfg, q.dtype), TOKENS=tile.pop("ROWS"), BLOCKS=cut.blocks, **tile,
        )  # fmt: skip
    return blocks, bits


def room_for_terms(k: Tensor, dtype: torch.dtype, cfg: NSAConfig) -> tuple[Tensor, Tensor]:
    """For compressed keys as sums of numbers of a type [B,N,G,terms,Dk], and values [B,N,G,Dv].

    k: [B,S,G,Dk], or compressed already [B,N,G,Dk].
    """
    batch, n_tokens, groups = k.shape[:3]
    n_keys = cfg.n_compressed(n_tokens) if cfg.phi == "avg" else n_tokens
    shape = (batch, n_keys, groups)
    terms = torch.empty(*shape, n_terms(dtype), cfg.d_k, dtype=dtype, device=k.device)
    return terms, torch.empty(*shape, cfg.d_v, dtype=dtype, device=k.device)


def pool_constants(cfg: NSAConfig, dtype: torch.dtype) -> dict[str, int]:
    """What the kernel that pools is compiled for."""
    length, stride = pooled(cfg)
    tokens = min(TOKENS, triton.next_power_of_2(length))
    told = {"L": length, "STRIDE": stride, "D_K": cfg.d_k, "D_V": cfg.d_v, "TOKENS": tokens}
    return told | {"TERMS": n_terms(dtype)}


def sum_constants(cfg: NSAConfig, cut: CompressedCut) -> dict[str, int]:
    """What the kernel is compiled for that adds up the gradients of keys."""
    length, stride = pooled(cfg)
    shape = {"D_K": cfg.d_k, "D_V": cfg.d_v, "L": cfg.l, "STRIDE": cfg.d, "FEW": LEAST}
    return shape | {"KEYS": cut.owned, "PIECE": cut.piece, "POOL": length, "POOL_STRIDE": stride}


def pooled(cfg: NSAConfig) -> tuple[int, int]:
    """Tokens of a block, and from one to the next, as the kernels make it."""
    return (cfg.l, cfg.d) if cfg.phi == "avg" else (1, 1)


def n_terms(dtype: torch.dtype) -> int:
    """Numbers of a type that add up to a key, where its scores choose blocks."""
    return TERMS[str(dtype).removeprefix("torch.")]


def compressed_constants(cfg: NSAConfig) -> dict[str, int]:
    """What the kernels of attention are compiled for, beside how they are cut."""
    return launch.head_constants(cfg) | {"L": cfg.l, "STRIDE": cfg.d}


def top_constants(cfg: NSAConfig, dtype: torch.dtype) -> dict[str, int]:
    """What the selection is compiled for, beside how it is cut."""
    shape = {"D_K": cfg.d_k, "L": cfg.l, "STRIDE": cfg.d, "L_SEL": cfg.l_sel, "N_SEL": cfg.n_sel}
    return shape | {"TERMS": n_terms(dtype)}
