"""Kernel: all that the backward pass adds up at its end, in one launch.

Pieces of the gradients of keys and values, of each branch by its own rule, and what the branches
give to the gradient of the queries. Of a pair's programs, axis 0, the first n_selected take
selected blocks, FEW tokens of one each, the next n_compressed runs of compressed keys; the others
take runs of NUMBERS of what is left, the window's keys, its values and the queries, dealt to the
pairs in turn. Each number has one program that writes it.
"""

import triton
import triton.language as tl

from nsa.attention.triton.compressed.pool import sum_pooled
from nsa.attention.triton.rows import padded
from nsa.attention.triton.selected.readers import sum_block
from nsa.attention.triton.window import sum_pieces


@triton.jit
def sums_kernel(
    selected_parts, piece_ends, dk_sel, dv_sel, compressed_parts, dk_cmp, dv_cmp,
    parts_k, parts_v, dk_win, dv_win, dq_parts, dq,
    seq_len, groups, n_blocks, n_selected_pieces, n_selected, n_tokens, n_keys, n_pieces, n_tiles,
    n_compressed, n_k, n_v, n_q, dk_scale,
    D_K: tl.constexpr, D_V: tl.constexpr, L_SEL: tl.constexpr, L: tl.constexpr,
    STRIDE: tl.constexpr, KEYS: tl.constexpr, PIECE: tl.constexpr, FEW: tl.constexpr,
    POOL: tl.constexpr, POOL_STRIDE: tl.constexpr, PIECES: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    """dk, dv of the branches [B,T,G,D] and dq [B,S,G,HEADS,D_K], from parts of them.

    n_k, n_v, n_q: numbers of the window's dk and dv, 0 where these are not in pieces, and of dq.
    """
    number = tl.program_id(0)
    if number < n_selected:
        few: tl.constexpr = padded(L_SEL) // FEW
        sum_block(
            selected_parts, piece_ends, dk_sel, dv_sel, number // few, number % few, seq_len,
            groups, n_blocks, n_selected_pieces, dk_scale, D_K, D_V, L_SEL, FEW,
        )  # fmt: skip
    elif number < n_selected + n_compressed:
        sum_pooled(
            compressed_parts, dk_cmp, dv_cmp, number - n_selected, n_tokens, groups, n_keys,
            n_pieces, n_tiles, dk_scale, D_K, D_V, L, STRIDE, KEYS, PIECE, FEW, POOL, POOL_STRIDE,
        )  # fmt: skip
    else:
        rest = (number - n_selected - n_compressed) * tl.num_programs(1) + tl.program_id(1)
        of_k, of_v = tl.cdiv(n_k, NUMBERS), tl.cdiv(n_v, NUMBERS)
        if rest < of_k:
            sum_pieces(parts_k, dk_win, rest, n_k, PIECES, NUMBERS)
        elif rest < of_k + of_v:
            sum_pieces(parts_v, dv_win, rest - of_k, n_v, PIECES, NUMBERS)
        else:
            sum_pieces(dq_parts, dq, rest - of_k - of_v, n_q, 3, NUMBERS)
