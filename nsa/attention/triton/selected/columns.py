"""Kernels that own keys: gradients of keys and values, without an atomic operation.

The queries that read a block are listed (`index`), and each list is cut into pieces: a program adds
up one piece of one block, in the list's order, and a second kernel adds the pieces in theirs. Every
number has one program that writes it, so that equal inputs give equal bits.
"""

import triton
import triton.language as tl

from nsa.attention.triton.rows import NOTHING, give_keys
from nsa.attention.triton.selected.rows import block_side


@triton.jit
def this_piece(
    counts, offsets, piece_ends, piece, of_list, pair, n_blocks, list_len, HEADS: tl.constexpr,
    PIECE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The block of a piece (n_blocks: of none), where its readers begin, and how many rows.

    of_list: number of the list, counted over lists and pairs (`index`).
    """
    number = tl.arange(0, BLOCKS)
    ends = tl.load(piece_ends + of_list * n_blocks + number, number < n_blocks, 2147483647)
    block = tl.sum((ends <= piece).to(tl.int32), 0)
    of_block, real = of_list * n_blocks + block, block < n_blocks
    before = tl.load(piece_ends + of_block - 1, real & (block > 0), 0)
    skipped = (piece - before) * PIECE
    start = pair * list_len + tl.load(offsets + of_block, real, 0) + skipped
    rows = tl.minimum(tl.load(counts + of_block, real, 0) - skipped, PIECE) * HEADS
    return block, start, rows


@triton.jit
def piece_kernel(
    q, k, v, grad, lse, delta, readers, counts, offsets, piece_ends, parts,
    seq_len, groups, n_blocks, n_pieces, list_len, scale,
    q_b, q_t, q_g, q_h, k_b, k_t, k_g, v_b, v_t, v_g,
    HEADS: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, WIDTH_K: tl.constexpr,
    WIDTH_V: tl.constexpr, L_SEL: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    PLACES: tl.constexpr, PIECE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """dK and dV of one block by PIECE of its readers: float32 [BLOCK, WIDTH_K + WIDTH_V].

    Of the whole sequence, which is the first list: that of a pair has the pair's number.
    """
    piece = tl.program_id(0)
    pair = tl.program_id(1).to(tl.int64)
    batch, group = pair // groups, pair % groups
    block, start, rows = this_piece(
        counts, offsets, piece_ends, piece, pair, pair, n_blocks, list_len, HEADS, PIECE, BLOCKS
    )  # fmt: skip
    if block < n_blocks:
        keys, values, key = block_side(
            k, v, block, batch, group, seq_len, k_b, k_t, k_g, v_b, v_t, v_g, L_SEL, BLOCK, D_K,
            D_V, WIDTH_K, WIDTH_V,
        )  # fmt: skip
        inner, dim_k, dim_v = tl.arange(0, BLOCK), tl.arange(0, WIDTH_K), tl.arange(0, WIDTH_V)
        dk = tl.zeros((BLOCK, WIDTH_K), tl.float32)
        dv = tl.zeros((BLOCK, WIDTH_V), tl.float32)
        for first in range(0, rows, ROWS):
            row = first + tl.arange(0, ROWS)
            inside = row < rows
            entry = tl.load(readers + start + row // HEADS, inside, 0)
            # Rows beyond the list have token -1, which sees nothing.
            token = tl.where(inside, entry // PLACES, -1)
            far, head = token.to(tl.int64), row % HEADS
            of_k = inside[:, None] & (dim_k < D_K)[None, :]
            of_v = inside[:, None] & (dim_v < D_V)[None, :]
            at = q + batch * q_b + group * q_g + far * q_t + head * q_h
            queries = tl.load(at[:, None] + dim_k[None, :], of_k, 0.0)
            flat = ((batch * seq_len + far) * groups + group) * HEADS + head
            grads = tl.load(grad + (flat * D_V)[:, None] + dim_v[None, :], of_v, 0.0)
            in_pair = (pair * seq_len + far) * HEADS + head
            sums = tl.load(lse + in_pair, inside, 0.0)
            theirs = tl.load(delta + in_pair, inside, 0.0)
            scores = tl.dot(keys, tl.trans(queries), input_precision="ieee") * scale
            seen = key[:, None] <= token[None, :]
            p = tl.exp2(tl.where(seen, scores - sums[None, :], NOTHING))
            dk, dv = give_keys(dk, dv, p, queries, grads, values, theirs)
        to = parts + (pair * n_pieces + piece) * BLOCK * (WIDTH_K + WIDTH_V)
        to += inner[:, None] * (WIDTH_K + WIDTH_V)
        tl.store(to + dim_k[None, :], dk)
        tl.store(to + WIDTH_K + dim_v[None, :], dv)


@triton.jit
def sum_kernel(
    parts, piece_ends, dk, dv, seq_len, groups, n_blocks, n_pieces, dk_scale,
    D_K: tl.constexpr, D_V: tl.constexpr, WIDTH_K: tl.constexpr, WIDTH_V: tl.constexpr,
    L_SEL: tl.constexpr, BLOCK: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """dk [B,S,G,D_K] and dv [B,S,G,D_V] of FEW tokens: the sum over their block's pieces, in order.

    Few, because the first block and a program's wait for memory are what takes the time.
    """
    block = tl.program_id(0)
    pair = tl.program_id(1).to(tl.int64)
    batch, group = pair // groups, pair % groups
    inner = tl.program_id(2) * FEW + tl.arange(0, FEW)
    dim_k, dim_v = tl.arange(0, WIDTH_K), tl.arange(0, WIDTH_V)
    of_block = pair * n_blocks + block
    first = tl.load(piece_ends + of_block - 1, block > 0, 0)
    total_k = tl.zeros((FEW, WIDTH_K), tl.float32)
    total_v = tl.zeros((FEW, WIDTH_V), tl.float32)
    for piece in range(first, tl.load(piece_ends + of_block)):
        at = parts + (pair * n_pieces + piece) * BLOCK * (WIDTH_K + WIDTH_V)
        at += inner[:, None] * (WIDTH_K + WIDTH_V)
        total_k += tl.load(at + dim_k[None, :])
        total_v += tl.load(at + WIDTH_K + dim_v[None, :])
    token = block * L_SEL + inner
    inside = ((inner < L_SEL) & (token < seq_len))[:, None]
    flat = (batch * seq_len + token.to(tl.int64)) * groups + group
    to_k = dk + (flat * D_K)[:, None] + dim_k[None, :]
    to_v = dv + (flat * D_V)[:, None] + dim_v[None, :]
    tl.store(to_k, (total_k * dk_scale).to(dk.dtype.element_ty), inside & (dim_k < D_K)[None, :])
    tl.store(to_v, total_v.to(dv.dtype.element_ty), inside & (dim_v < D_V)[None, :])
