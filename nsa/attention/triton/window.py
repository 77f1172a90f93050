"""What kernels do about the sliding window, and the one that owns its keys.

Rows and tiles are those of `rows`. A tile of queries walks over the keys from the first that its
first token sees to its last token, KEYS at a time. A program that owns KEYS neighboring keys of one
kv group needs no list of who sees them: it walks over the rows of the tokens from the first key to
w - 1 after the last. In between every row sees every key: only the tiles at the two ends of a walk
are masked, and they come last. Short sequences have fewer keys than a device wants programs: there
each of several programs (axis 2 of the grid) takes one piece of a walk over rows, and what they
wrote is added up (`sums_kernel`). Every number has one program that writes it, and no order depends
on chance: equal inputs give equal bits.

log-sum-exp is kept to the base 2. A row always sees its own token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.attention.triton import WindowCut
from nsa.attention.triton.launch import head_constants, how, scale_of, strides_of
from nsa.attention.triton.rows import (
    NOTHING,
    give_keys,
    give_queries,
    load_keys,
    load_rows,
    padded,
    store_keys,
    store_rows,
    tile_of,
)
from nsa.config import NSAConfig


@triton.jit
def near(token, key, w):
    """Does a token see a key?"""
    return (key <= token) & (key > token - w)


@triton.jit
def span(first, last, w, KEYS: tl.constexpr):
    """Walk of a tile of tokens: its first key; tiles that are masked, until which whole, in all."""
    start = tl.maximum(first - w + 1, 0)
    masked = tl.cdiv(tl.maximum(last - w + 1 - start, 0), KEYS)
    whole = tl.maximum((first + 1 - start) // KEYS, masked)
    return start, masked, whole, tl.cdiv(last + 1 - start, KEYS)


@triton.jit
def _absorb(
    best, total, acc, queries, token, first, k, k_t, v, v_t, seq_len, w, scale, D_K: tl.constexpr,
    D_V: tl.constexpr,
    KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """KEYS keys more in the running softmax: largest score, sum and output of each row."""
    keys = load_keys(k, k_t, first, seq_len, KEYS, D_K)
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    if MASKED:
        key = first + tl.arange(0, KEYS)
        scores = tl.where(near(token[:, None], key[None, :], w), scores, NOTHING)
    # Scaled with the subtraction, in one instruction.
    higher = tl.maximum(best, tl.max(scores, 1) * scale)
    shift = higher
    if MASKED:
        # Rows that have seen nothing yet: minus infinity less itself is no number.
        shift = tl.where(higher == NOTHING, 0.0, higher)
    p = tl.exp2(scores * scale - shift[:, None])
    keep = tl.exp2(best - shift)
    values = load_keys(v, v_t, first, seq_len, KEYS, D_V)
    acc = acc * keep[:, None]
    acc = tl.dot(p.to(values.dtype), values, acc, input_precision="ieee")
    return higher, total * keep + tl.sum(p, 1), acc


@triton.jit
def attend_window(
    tile, q, k, v, out, lse, seq_len, groups, w, scale,
    q_b, q_t, q_g, q_h, k_b, k_t, k_g, v_b, v_t, v_g,
    HEADS: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, KEYS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Output [B,S,G,HEADS,D_V] and log-sum-exp [B*G, S*HEADS] of one tile. scale: by log2 e.

    Programs along axis 1 are pairs.
    """
    tile, pair, batch, group, row, token, head, inside = tile_of(tile, seq_len, groups, HEADS, ROWS)
    queries = load_rows(q + batch * q_b + group * q_g, q_t, q_h, token, head, inside, D_K)
    k += batch * k_b + group * k_g
    v += batch * v_b + group * v_g
    best = tl.full((ROWS,), NOTHING, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, padded(D_V)), tl.float32)
    last = tl.minimum((tile * ROWS + ROWS - 1) // HEADS, seq_len - 1)
    start, masked, whole, end = span(tile * ROWS // HEADS, last, w, KEYS)
    for at_ends in tl.static_range(2):
        low, high = (0, masked + end - whole) if at_ends else (masked, whole)
        for number in range(low, high):
            at = number
            if at_ends:
                at = tl.where(number < masked, number, number - masked + whole)
            best, total, acc = _absorb(
                best, total, acc, queries, token, start + at * KEYS, k, k_t, v, v_t, seq_len, w,
                scale, D_K, D_V, KEYS, at_ends,
            )  # fmt: skip
    # Rows beyond the sequence may have seen nothing, and are not stored.
    acc = acc / total[:, None]
    store_rows(out, acc, batch, group, token, head, inside, seq_len, groups, HEADS, D_V)
    tl.store(lse + pair * seq_len * HEADS + row, best + tl.log2(total), inside)


@triton.jit
def _gradient(
    acc, queries, grads, sums, delta, token, first, k, k_t, v, v_t, seq_len, w, scale,
    D_K: tl.constexpr, D_V: tl.constexpr,
    KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """What KEYS keys more add to the gradient of the queries, before its scale."""
    keys = load_keys(k, k_t, first, seq_len, KEYS, D_K)
    values = load_keys(v, v_t, first, seq_len, KEYS, D_V)
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    p = tl.exp2(scores * scale - sums[:, None])
    if MASKED:
        key = first + tl.arange(0, KEYS)
        p = tl.where(near(token[:, None], key[None, :], w), p, 0.0)
    return give_queries(acc, p, grads, keys, values, delta)


@triton.jit
def give_by_window(
    acc, tile, queries, grads, mine, sums, batch, group, token, k, v, seq_len, w, scale,
    k_b, k_t, k_g, v_b, v_t, v_g,
    HEADS: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, KEYS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """What the keys of the window add to the gradient of a tile's queries, before its scale."""
    k += batch * k_b + group * k_g
    v += batch * v_b + group * v_g
    last = tl.minimum((tile * ROWS + ROWS - 1) // HEADS, seq_len - 1)
    start, masked, whole, end = span(tile * ROWS // HEADS, last, w, KEYS)
    for at_ends in tl.static_range(2):
        low, high = (0, masked + end - whole) if at_ends else (masked, whole)
        for number in range(low, high):
            at = number
            if at_ends:
                at = tl.where(number < masked, number, number - masked + whole)
            acc = _gradient(
                acc, queries, grads, sums, mine, token, start + at * KEYS, k, k_t, v, v_t, seq_len,
                w, scale, D_K, D_V, KEYS, at_ends,
            )  # fmt: skip
    return acc


@triton.jit
def _gradients(
    dk, dv, keys, values, key, first, rows_end, q, q_t, q_h, grad, grad_t, lse, delta, w, scale,
    HEADS: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, ROWS: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """What ROWS rows more add to the gradients of the keys, before its scale, and values."""
    row = first + tl.arange(0, ROWS)
    token, head = row // HEADS, row % HEADS
    inside = row < rows_end
    queries = load_rows(q, q_t, q_h, token, head, inside, D_K)
    grads = load_rows(grad, grad_t, D_V, token, head, inside, D_V)
    sums = tl.load(lse + row, inside, 0.0)
    theirs = tl.load(delta + row, inside, 0.0)
    scores = tl.dot(keys, tl.trans(queries), input_precision="ieee")
    p = tl.exp2(scores * scale - sums[None, :])
    if MASKED:
        p = tl.where(near(token[None, :], key[:, None], w) & inside[None, :], p, 0.0)
    return give_keys(dk, dv, p, queries, grads, values, theirs)


@triton.jit
def window_keys_kernel(
    q, k, v, grad, lse, delta, dk, dv, seq_len, groups, w, scale, dk_scale,
    q_b, q_t, q_g, q_h, k_b, k_t, k_g, v_b, v_t, v_g,
    HEADS: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, KEYS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """dk [B,S,G,D_K] and dv [B,S,G,D_V] of KEYS keys; of several pieces: [pieces,B,S,G,D]."""
    first = tl.program_id(0) * KEYS
    pair = tl.program_id(1).to(tl.int64)
    batch, group = pair // groups, pair % groups
    keys = load_keys(k + batch * k_b + group * k_g, k_t, first, seq_len, KEYS, D_K)
    values = load_keys(v + batch * v_b + group * v_g, v_t, first, seq_len, KEYS, D_V)
    key = first + tl.arange(0, KEYS)
    q += batch * q_b + group * q_g
    grad += (batch * seq_len * groups + group) * HEADS * D_V
    lse += pair * seq_len * HEADS
    delta += pair * seq_len * HEADS
    sum_k = tl.zeros((KEYS, padded(D_K)), tl.float32)
    sum_v = tl.zeros((KEYS, padded(D_V)), tl.float32)
    last = tl.minimum(first + KEYS, seq_len) - 1
    begin, rows_end = first * HEADS, tl.minimum(last + w, seq_len) * HEADS
    # Tokens from the last key on, until the first key is too far behind, see them all.
    masked = tl.cdiv((last - first) * HEADS, ROWS)
    whole = (tl.minimum(first + w, seq_len) * HEADS - begin) // ROWS
    whole = tl.maximum(whole, masked)
    end = tl.cdiv(rows_end - begin, ROWS)
    masked, whole = tl.minimum(masked, end), tl.minimum(whole, end)
    piece, n_pieces = tl.program_id(2), tl.num_programs(2)
    low, high = end * piece // n_pieces, end * (piece + 1) // n_pieces
    for number in range(tl.maximum(masked, low), tl.minimum(whole, high)):
        sum_k, sum_v = _gradients(
            sum_k, sum_v, keys, values, key, begin + number * ROWS, rows_end, q, q_t, q_h, grad,
            groups * HEADS * D_V, lse, delta, w, scale, HEADS, D_K, D_V, ROWS, False,
        )  # fmt: skip
    # The masked ones of this piece at the beginning of the walk, and from where they go on.
    few, again = tl.maximum(tl.minimum(masked, high) - low, 0), tl.maximum(whole, low)
    for number in range(few + tl.maximum(high - again, 0)):
        at = tl.where(number < few, low + number, again + number - few)
        sum_k, sum_v = _gradients(
            sum_k, sum_v, keys, values, key, begin + at * ROWS, rows_end, q, q_t, q_h, grad,
            groups * HEADS * D_V, lse, delta, w, scale, HEADS, D_K, D_V, ROWS, True,
        )  # fmt: skip
    of_piece = piece * (tl.num_programs(1) // groups)
    flat = ((of_piece + batch) * seq_len + key.to(tl.int64)) * groups + group
    store_keys(dk, dv, sum_k, sum_v, flat, key < seq_len, dk_scale, D_K, D_V)


@triton.jit
def sum_pieces(parts, to, number, n, PIECES: tl.constexpr, NUMBERS: tl.constexpr):
    """The run of NUMBERS with a number, of n numbers: the sum of parts [PIECES, n], in order."""
    at = number.to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    total = tl.zeros((NUMBERS,), tl.float32)
    part = parts + at
    for _ in range(PIECES):
        total += tl.load(part, at < n, 0.0).to(tl.float32)
        part += n
    tl.store(to + at, total.to(to.dtype.element_ty), at < n)


# That a program adds up: eight for each thread.
NUMBERS = 1024


def constants(cfg: NSAConfig, cut: WindowCut) -> dict[str, int]:
    """What the window's kernels are compiled for."""
    return head_constants(cfg) | {"KEYS": cut.keys}


def give_keys_of_window(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, lse: Tensor, delta: Tensor, dk: Tensor,
    dv: Tensor, cfg: NSAConfig, cut: WindowCut,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Start the kernel that owns keys. Where it writes: dk and dv, or parts of them in pieces."""
    seq_len, groups = q.shape[1:3]
    into = (dk, dv) if cut.pieces == 1 else _parts(dk, dv, cut.pieces)
    window_keys_kernel[triton.cdiv(seq_len, cut.keys), q.shape[0] * groups, cut.pieces](
        q, k, v, grad, lse, delta, *into, seq_len, groups, min(cfg.w, seq_len), scale_of(cfg),
        cfg.d_k**-0.5, *strides_of(q, k, v), **constants(cfg, cut), **how(cut.key_gradient),
    )  # fmt: skip
    return into


def _parts(dk: Tensor, dv: Tensor, pieces: int) -> tuple[Tensor, Tensor]:
    """Room for what each piece of a walk adds to the gradients of keys and values."""
    parts_k, parts_v = (
        torch.empty(pieces, *x.shape, dtype=torch.float32, device=x.device) for x in (dk, dv)
    )
    return parts_k, parts_v
