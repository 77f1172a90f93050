"""Kernels that serve all branches of a layer's core in one launch each.

`first_kernel`: the window and the pooled keys. Programs that pool come last: each of them has
little to do, and fills what the others leave free.

`queries_kernel`: the gradient of the queries by all branches, and that of the gates. The gated sum
needs no pass of its own. Of a branch whose gate is g, a row's output enters the sum
as g times what the branch gave it, and the gradient of that is g times the sum's. Probabilities are
made again from scores and the row's log-sum-exp: with log2 g taken from it they come out times g,
and then the sum's own gradient serves all branches, in the loops of every kernel, as it is. What
the gate's gradient is, <gradient, output>, is what softmax takes off each product.

So a row keeps two numbers for the kernels that own keys: `delta`, and the log-sum-exp less log2 g
(`sums`), both float32 [3, B*G, S*HEADS], branches in the order of the gates. A gate is not
negative; where it is 0, `sums` is infinite, and no key gives anything.

A program takes a tile of rows and one branch. One after the other in one program, the branches'
loops would need more registers than a thread has; what each gives is added up by `sums_kernel`.

`sums_kernel`: pieces of the gradients of keys and values, of each branch by its own rule, and what
the branches give to the gradient of the queries. Of a pair's programs, axis 0, the first n_selected
take selected blocks, FEW tokens of one each, the next n_compressed runs of compressed keys; the
others take runs of NUMBERS of what is left, the window's keys, its values and the queries, dealt to
the pairs in turn. Each number has one program that writes it.
"""

import triton
import triton.language as tl

from nsa.attention.triton.compressed.rows import give_by_compressed, pool, sum_pooled
from nsa.attention.triton.rows import load_rows, padded, store_rows, tile_of
from nsa.attention.triton.selected.readers import sum_block
from nsa.attention.triton.selected.rows import give_by_selected
from nsa.attention.triton.window import attend_window, give_by_window, sum_pieces


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


@triton.jit
def _begin(
    branch: tl.constexpr, tile, q, grad, gates, out, lse, sums, delta, d_gates, seq_len, groups,
    q_b, q_t, q_g, q_h, gates_b, gates_t, gates_h, HEADS: tl.constexpr, D_K: tl.constexpr,
    D_V: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """What a tile's gradient by a branch begins with; delta, sums and the gates' are stored.

    That is its pair, batch element and group, and of its rows tokens, heads, whether they exist,
    queries, gradients of the sum, delta and sums.
    """
    tile, pair, batch, group, row, token, head, inside = tile_of(tile, seq_len, groups, HEADS, ROWS)
    queries = load_rows(q + batch * q_b + group * q_g, q_t, q_h, token, head, inside, D_K)
    values, step = (batch * seq_len * groups + group) * HEADS * D_V, groups * HEADS * D_V
    grads = load_rows(grad + values, step, D_V, token, head, inside, D_V)
    outs = load_rows(out + values, step, D_V, token, head, inside, D_V)
    mine = tl.sum(grads.to(tl.float32) * outs.to(tl.float32), 1)
    far = token.to(tl.int64)
    gate = gates + batch * gates_b + far * gates_t + (group * HEADS + head) * gates_h + branch
    at = pair * seq_len * HEADS + row
    theirs = tl.load(lse + at, inside, 0.0) - tl.log2(tl.load(gate, inside, 1.0).to(tl.float32))
    of_rows = tl.num_programs(1).to(tl.int64) * seq_len * HEADS * branch + at
    tl.store(delta + of_rows, mine, inside)
    tl.store(sums + of_rows, theirs, inside)
    to = (((batch * seq_len + far) * groups + group) * HEADS + head) * 3 + branch
    tl.store(d_gates + to, mine.to(d_gates.dtype.element_ty), inside)
    return pair, batch, group, token, head, inside, queries, grads, mine, theirs


@triton.jit
def queries_kernel(
    q, grad, gates, dq, d_gates, sums, delta,
    terms, values, cmp, cmp_lse, k_sel, v_sel, bits, sel, sel_lse, k_win, v_win, win, win_lse,
    seq_len, groups, n_keys, n_words, w, scale, dq_scale,
    q_b, q_t, q_g, q_h, gates_b, gates_t, gates_h, terms_b, terms_t, terms_g,
    values_b, values_t, values_g, k_sel_b, k_sel_t, k_sel_g, v_sel_b, v_sel_t, v_sel_g,
    k_win_b, k_win_t, k_win_g, v_win_b, v_win_t, v_win_g,
    HEADS: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, L: tl.constexpr,
    STRIDE: tl.constexpr, L_SEL: tl.constexpr, COMPRESSED_KEYS: tl.constexpr,
    WINDOW_KEYS: tl.constexpr, ROWS: tl.constexpr, WALKS: tl.constexpr,
):  # fmt: skip
    """dq [3,B,S,G,HEADS,D_K], by branches, d_gates [B,S,G,HEADS,3], sums and delta of a tile.

    grad and the branches' outputs [B,S,G,HEADS,D_V] are contiguous. Without WALKS what selected
    blocks give is left to kernels that own blocks.
    """
    n_tiles = tl.cdiv(seq_len * HEADS, ROWS)
    # Late tiles have the most to do: they begin first.
    tile, branch = n_tiles - 1 - tl.program_id(0) % n_tiles, tl.program_id(0) // n_tiles
    size = tl.num_programs(1).to(tl.int64) * seq_len * HEADS * D_K
    acc = tl.zeros((ROWS, padded(D_K)), tl.float32)
    # Each by itself, down to the store: what they shared would be held in registers by all.
    if branch == 1:
        pair, batch, group, token, head, inside, queries, grads, mine, theirs = _begin(
            1, tile, q, grad, gates, sel, sel_lse, sums, delta, d_gates, seq_len, groups,
            q_b, q_t, q_g, q_h, gates_b, gates_t, gates_h, HEADS, D_K, D_V, ROWS,
        )  # fmt: skip
        if WALKS:
            acc = give_by_selected(
                acc, tile, queries, grads, mine, theirs, pair, batch, group, token, inside, k_sel,
                v_sel, bits, seq_len, n_words, scale, k_sel_b, k_sel_t, k_sel_g, v_sel_b, v_sel_t,
                v_sel_g, HEADS, D_K, D_V, L_SEL, ROWS,
            )  # fmt: skip
            store_rows(
                dq + size, acc * dq_scale, batch, group, token, head, inside, seq_len, groups,
                HEADS, D_K,
            )  # fmt: skip
    elif branch == 2:
        pair, batch, group, token, head, inside, queries, grads, mine, theirs = _begin(
            2, tile, q, grad, gates, win, win_lse, sums, delta, d_gates, seq_len, groups,
            q_b, q_t, q_g, q_h, gates_b, gates_t, gates_h, HEADS, D_K, D_V, ROWS,
        )  # fmt: skip
        acc = give_by_window(
            acc, tile, queries, grads, mine, theirs, batch, group, token, k_win, v_win, seq_len, w,
            scale, k_win_b, k_win_t, k_win_g, v_win_b, v_win_t, v_win_g, HEADS, D_K, D_V,
            WINDOW_KEYS, ROWS,
        )  # fmt: skip
        store_rows(
            dq + 2 * size, acc * dq_scale, batch, group, token, head, inside, seq_len, groups,
            HEADS, D_K,
        )  # fmt: skip
    else:
        pair, batch, group, token, head, inside, queries, grads, mine, theirs = _begin(
            0, tile, q, grad, gates, cmp, cmp_lse, sums, delta, d_gates, seq_len, groups,
            q_b, q_t, q_g, q_h, gates_b, gates_t, gates_h, HEADS, D_K, D_V, ROWS,
        )  # fmt: skip
        acc = give_by_compressed(
            acc, tile, queries, grads, mine, theirs, batch, group, token, terms, values, seq_len,
            n_keys, scale, terms_b, terms_t, terms_g, values_b, values_t, values_g, HEADS, D_K,
            D_V, L, STRIDE, COMPRESSED_KEYS, ROWS,
        )  # fmt: skip
        store_rows(
            dq, acc * dq_scale, batch, group, token, head, inside, seq_len, groups, HEADS, D_K
        )  # fmt: skip


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
