"""What all kernels share: rows of queries, blocks of keys, and the running softmax.

A program that owns queries takes ROWS rows of one kv group: row t*HEADS + h is head h of token t.
Neighboring tokens fill a tile of the tensor cores whatever HEADS is, keys are read once for all
heads, and no head has a mask of its own.

WIDTH, of rows and keys of D numbers: `padded(D)`, and BLOCK: `padded(L_SEL)`.
"""

import triton
import triton.language as tl

from nsa.attention.triton import padded as _padded

NOTHING = tl.constexpr(float("-inf"))
padded = triton.constexpr_function(_padded)


@triton.jit
def load_keys(base, stride, first, end, KEYS: tl.constexpr, D: tl.constexpr):
    """Keys or values [KEYS, WIDTH] from number `first` on; zeros from `end` on and beyond D."""
    token = first + tl.arange(0, KEYS)
    dim = tl.arange(0, padded(D))
    inside = (token < end)[:, None] & (dim < D)[None, :]
    return tl.load(base + token.to(tl.int64)[:, None] * stride + dim[None, :], inside, 0.0)


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
def this_tile(seq_len, groups, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """The program's tile, its pair of batch and group, and of its rows number, token and head."""
    # Late tiles have the most to do: they begin first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    return tile_of(tile, seq_len, groups, HEADS, ROWS)


@triton.jit
def tile_of(tile, seq_len, groups, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """The same of a given tile; programs along axis 1 are pairs."""
    row = tile * ROWS + tl.arange(0, ROWS)
    pair, token = tl.program_id(1).to(tl.int64), row // HEADS
    return tile, pair, pair // groups, pair % groups, row, token, row % HEADS, token < seq_len


@triton.jit
def load_rows(base, token_stride, head_stride, token, head, inside, D: tl.constexpr):
    """Rows [ROWS, WIDTH] of one batch element and group; zeros where not inside and beyond D."""
    dim = tl.arange(0, padded(D))
    far = token.to(tl.int64)
    at = base + far * token_stride + head * head_stride
    return tl.load(at[:, None] + dim[None, :], inside[:, None] & (dim < D)[None, :], 0.0)


@triton.jit
def store_rows(
    base, rows, batch, group, token, head, inside, seq_len, groups, HEADS: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """Rows [ROWS, WIDTH] into [B,S,G,HEADS,D], as far as they are inside."""
    dim = tl.arange(0, padded(D))
    to = ((batch * seq_len + token.to(tl.int64)) * groups + group) * HEADS + head
    seen = inside[:, None] & (dim < D)[None, :]
    tl.store(base + (to * D)[:, None] + dim[None, :], rows.to(base.dtype.element_ty), seen)


@triton.jit
def absorb(best, total, acc, scores, scale, values, reads):
    """Scores [ROWS, KEYS] in the running softmax: largest score, sum and output of each row.

    scores: before their scale. reads [ROWS]: rows that take part; the others stay as they are.
    """
    # Scaled with the subtraction, in one instruction.
    higher = tl.where(reads, tl.maximum(best, tl.max(scores, 1) * scale), best)
    # Rows that have seen nothing yet: minus infinity less itself is no number.
    shift = tl.where(higher == NOTHING, 0.0, higher)
    # Less infinity: one choice for a row that takes no part, not one for each of its scores.
    p = tl.exp2(scores * scale - tl.where(reads, shift, float("inf"))[:, None])
    keep = tl.exp2(best - shift)
    acc = acc * keep[:, None]
    acc = tl.dot(p.to(values.dtype), values, acc, input_precision="ieee")
    return higher, total * keep + tl.sum(p, 1), acc


@triton.jit
def give_queries(acc, p, grads, keys, values, delta):
    """What keys add to the gradient acc [ROWS, WIDTH] of the queries, before its scale.

    p: probabilities [ROWS, KEYS]. delta: each row's <grad, out>.
    """
    dp = tl.dot(grads, tl.trans(values), input_precision="ieee")
    ds = p * (dp - delta[:, None])
    return tl.dot(ds.to(keys.dtype), keys, acc, input_precision="ieee")


@triton.jit
def give_keys(dk, dv, p, queries, grads, values, delta):
    """The gradients of keys [KEYS, WIDTH], before their scale, and values with what rows add.

    p: probabilities [KEYS, ROWS].
    """
    dv = tl.dot(p.to(grads.dtype), grads, dv, input_precision="ieee")
    dp = tl.dot(values, tl.trans(grads), input_precision="ieee")
    ds = p * (dp - delta[None, :])
    return tl.dot(ds.to(queries.dtype), queries, dk, input_precision="ieee"), dv


@triton.jit
def _parts(parts, number, key, KEYS: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr):
    """Where part `number` of the gradients of keys, and of values, lies for `key` of KEYS keys.

    parts: float32 [..., KEYS, WIDTH_K + WIDTH_V].
    """
    width: tl.constexpr = padded(D_K) + padded(D_V)
    to = parts + number * KEYS * width + key[:, None] * width
    dim_k, dim_v = tl.arange(0, padded(D_K)), tl.arange(0, padded(D_V))
    return to + dim_k[None, :], to + padded(D_K) + dim_v[None, :]


@triton.jit
def store_part(
    parts, number, dk, dv, KEYS: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr
):  # fmt: skip
    """What a program adds to the gradients of KEYS keys and values, as part `number`."""
    to_k, to_v = _parts(parts, number, tl.arange(0, KEYS), KEYS, D_K, D_V)
    tl.store(to_k, dk)
    tl.store(to_v, dv)


@triton.jit
def sum_parts(
    parts, number, first, end, key, KEYS: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr
):  # fmt: skip
    """The sum of parts from `number + first` to before `number + end`, in their order."""
    total_k = tl.zeros((key.shape[0], padded(D_K)), tl.float32)
    total_v = tl.zeros((key.shape[0], padded(D_V)), tl.float32)
    for piece in range(first, end):
        at_k, at_v = _parts(parts, number + piece, key, KEYS, D_K, D_V)
        total_k += tl.load(at_k)
        total_v += tl.load(at_v)
    return total_k, total_v


@triton.jit
def store_keys(
    dk, dv, sum_k, sum_v, flat, inside, scale, D_K: tl.constexpr, D_V: tl.constexpr
):  # fmt: skip
    """Gradients of keys, times `scale`, and of values, as far as they are inside.

    flat: number of each among the keys of all groups.
    """
    dim_k, dim_v = tl.arange(0, padded(D_K)), tl.arange(0, padded(D_V))
    to_k = dk + (flat * D_K)[:, None] + dim_k[None, :]
    to_v = dv + (flat * D_V)[:, None] + dim_v[None, :]
    of_k, of_v = inside[:, None] & (dim_k < D_K)[None, :], inside[:, None] & (dim_v < D_V)[None, :]
    tl.store(to_k, (sum_k * scale).to(dk.dtype.element_ty), of_k)
    tl.store(to_v, sum_v.to(dv.dtype.element_ty), of_v)
