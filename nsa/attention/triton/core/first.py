"""Kernel: what a layer's core can begin with, the window and the pooled keys, in one launch.

Programs that pool come last: each of them has little to do, and fills what the others leave free.
"""

import triton
import triton.language as tl

from nsa.attention.triton.compressed.pool import pool
from nsa.attention.triton.window import attend_window


@triton.jit
def first_kernel(
    q, k_win, v_win, win, lse, k_cmp, v_cmp, terms, values, seq_len, groups, n_keys, w, scale,
    q_b, q_t, q_g, q_h, k_win_b, k_win_t, k_win_g, v_win_b, v_win_t, v_win_g,
    k_cmp_b, k_cmp_t, k_cmp_g, v_cmp_b, v_cmp_t, v_cmp_g,
    HEADS: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, KEYS: tl.constexpr,
    ROWS: tl.constexpr, L: tl.constexpr, STRIDE: tl.constexpr, TERMS: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """win [B,S,G,HEADS,D_V] with its log-sum-exp; terms [B,N,G,TERMS,D_K], values [B,N,G,D_V]."""
    n_tiles = tl.cdiv(seq_len * HEADS, ROWS)
    number = tl.program_id(0)
    if number < n_tiles:
        attend_window(
            n_tiles - 1 - number, q, k_win, v_win, win, lse, seq_len, groups, w, scale,
            q_b, q_t, q_g, q_h, k_win_b, k_win_t, k_win_g, v_win_b, v_win_t, v_win_g, HEADS, D_K,
            D_V, KEYS, ROWS,
        )  # fmt: skip
    else:
        pool(
            k_cmp, v_cmp, terms, values, number - n_tiles, n_keys, groups, k_cmp_b, k_cmp_t,
            k_cmp_g, v_cmp_b, v_cmp_t, v_cmp_g, L, STRIDE, D_K, D_V, TERMS, TOKENS,
        )  # fmt: skip
