"""A layer's core in 4 launches and 7 back: kernels that serve several branches, what starts all.

Forward: the window with the pooled keys; the compressed branch; the choice of blocks with their
bits; the selected branch with the gated sum. Backward: two that list who reads each block; the
gradient of the queries; three that own keys, each cut as it is best by itself; all sums. Where
blocks own the work of the selected branch its own kernels take their launches beside these, a run
of positions after the other. Nothing asks the device for a number.

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

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.attention.triton import LEAST, CompressedCut, SelectedCut, Tile, WindowCut, launch, window
from nsa.attention.triton import compressed as compressed
from nsa.attention.triton import selected as selected
from nsa.attention.triton.compressed.rows import give_by_compressed, pool, sum_pooled
from nsa.attention.triton.rows import load_rows, padded, store_rows, tile_of
from nsa.attention.triton.selected.queries import give_by_selected
from nsa.attention.triton.selected.readers import sum_block
from nsa.attention.triton.window import attend_window, give_by_window, sum_pieces
from nsa.config import NSAConfig


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


def window_and_terms(
    q: Tensor, k_win: Tensor, v_win: Tensor, k_cmp: Tensor, v_cmp: Tensor, cfg: NSAConfig
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The window's output [B,S,G,h,Dv] and log-sum-exp; compressed keys and values (`pool`)."""
    batch, seq_len, groups, heads = q.shape[:4]
    cut: WindowCut = launch.cut_of("window", q, cfg)
    q, k_win, v_win, k_cmp, v_cmp = (launch.inner(x) for x in (q, k_win, v_win, k_cmp, v_cmp))
    out, lse = launch.results_of(q, cfg, q.dtype)
    terms, values = compressed.room_for_terms(k_cmp, q.dtype, cfg)
    n_keys = terms.shape[1]
    programs = triton.cdiv(seq_len * heads, cut.forward.rows) + n_keys
    with launch.device_of(q):
        first_kernel[programs, batch * groups](
            q, k_win, v_win, out, lse, k_cmp, v_cmp, terms, values, seq_len, groups, n_keys,
            min(cfg.w, seq_len), launch.scale_of(cfg), *launch.strides_of(q, k_win, v_win),
            *k_cmp.stride()[:3], *v_cmp.stride()[:3], **first_constants(cfg, q.dtype, cut),
            **launch.how(cut.forward),
        )  # fmt: skip
    return out, lse, terms, values


def first_constants(cfg: NSAConfig, dtype: torch.dtype, cut: WindowCut) -> dict[str, int]:
    """What the first kernel is compiled for, beside its tile."""
    return window.constants(cfg, cut) | compressed.pool_constants(cfg, dtype)


@dataclass(frozen=True, kw_only=True)
class Cuts:
    """How the branches of one call are cut."""

    compressed: CompressedCut
    selected: SelectedCut
    window: WindowCut

    @classmethod
    def of(cls, q: Tensor, cfg: NSAConfig) -> Cuts:
        """For q [B,S,G,h,Dk], as it was best on its device."""
        return cls(
            **{name: launch.cut_of(name, q, cfg) for name in ("compressed", "selected", "window")}
        )

    @property
    def queries(self) -> Tile:
        """Of the gradient of the queries: what suits the branch that takes most of its time."""
        cut = self.window if self.selected.by_block else self.selected
        return cut.query_gradient


def backward(
    grad: Tensor, given: tuple[Tensor, ...], kept: tuple[Tensor, ...], cfg: NSAConfig
) -> tuple[Tensor, ...]:
    """Gradients of what was given: q, keys and values of each branch, gates; equal bits each time.

    given: q [B,S,G,h,Dk], k and v [B,T,G,D] of the compressed, selected and window branch, gates
    [B,S,H,3]. kept: bits, terms, values; then output [B,S,G,h,Dv] and log-sum-exp of each branch.
    """
    q, _, _, k_sel, v_sel, k_win, v_win, gates = given
    bits, terms, values, cmp, cmp_lse, win, win_lse, sel, sel_lse = kept
    cuts = Cuts.of(q, cfg)
    grad = grad.contiguous()
    q, gates, k_sel, v_sel, k_win, v_win = (
        launch.inner(x) for x in (q, gates, k_sel, v_sel, k_win, v_win)
    )
    made = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in given]
    dq, dk_cmp, dv_cmp, dk_sel, dv_sel, dk_win, dv_win, d_gates = made
    rounded = terms[:, :, :, 0]
    parts_q = torch.empty(3, *q.shape, dtype=q.dtype, device=q.device)
    sums, delta = (
        torch.empty(3, *cmp_lse.shape, dtype=torch.float32, device=q.device) for _ in range(2)
    )
    batch, seq_len, groups, heads = q.shape[:4]
    pairs, by_block = batch * groups, cuts.selected.by_block
    with launch.device_of(q):
        lists = selected.lists_of(bits, cfg, cuts.selected)
        queries_kernel[3 * triton.cdiv(seq_len * heads, cuts.queries.rows), pairs](
            q, grad, gates, parts_q, d_gates, sums, delta, rounded, values, cmp, cmp_lse,
            k_sel, v_sel, bits, sel, sel_lse, k_win, v_win, win, win_lse, seq_len, groups,
            terms.shape[1], bits.shape[1], min(cfg.w, seq_len), launch.scale_of(cfg), cfg.d_k**-0.5,
            *q.stride()[:4], *gates.stride()[:3], *rounded.stride()[:3], *values.stride()[:3],
            *k_sel.stride()[:3], *v_sel.stride()[:3], *k_win.stride()[:3], *v_win.stride()[:3],
            **queries_constants(cfg, cuts), **launch.how(cuts.queries),
        )  # fmt: skip
        if by_block:
            selected.give_queries_by_block(
                q, k_sel, v_sel, lists, sums[1], grad, parts_q[1], delta[1], cfg, by_block
            )  # fmt: skip
        of_sel = selected.give_keys_of_blocks(
            q, k_sel, v_sel, grad, sums[1], delta[1], lists, cfg, cuts.selected
        )  # fmt: skip
        of_cmp = compressed.give_keys_of_compressed(
            q, rounded, values, grad, sums[0], delta[0], cfg, cuts.compressed
        )  # fmt: skip
        of_win = window.give_keys_of_window(
            q, k_win, v_win, grad, sums[2], delta[2], dk_win, dv_win, cfg, cuts.window
        )  # fmt: skip
        _add_up(
            (of_sel, lists.ends, dk_sel, dv_sel, of_cmp, dk_cmp, dv_cmp, *of_win, dk_win, dv_win,
             parts_q, dq), seq_len, terms.shape[1], cfg, cuts,
        )  # fmt: skip
    return tuple(made)


def queries_constants(cfg: NSAConfig, cuts: Cuts) -> dict[str, int | bool]:
    """What the kernel of the gradient of the queries is compiled for, beside its tile."""
    shape = compressed.compressed_constants(cfg) | {"L_SEL": cfg.l_sel}
    keys = {"COMPRESSED_KEYS": cuts.compressed.rounded_keys, "WINDOW_KEYS": cuts.window.keys}
    return {**shape, **keys, "WALKS": not cuts.selected.by_block}


def sums_constants(cfg: NSAConfig, cuts: Cuts) -> dict[str, int]:
    """What the kernel of all sums is compiled for."""
    of_window = {"PIECES": cuts.window.pieces, "NUMBERS": window.NUMBERS}
    return compressed.sum_constants(cfg, cuts.compressed) | {"L_SEL": cfg.l_sel} | of_window


def _add_up(
    tensors: tuple[Tensor, ...], seq_len: int, n_keys: int, cfg: NSAConfig, cuts: Cuts
) -> None:
    """Start the kernel of all sums on its tensors."""
    (of_sel, _, dk_sel, _, of_cmp, dk_cmp, _, _, _, dk_win, dv_win, _, dq) = tensors
    pairs, n_blocks, n_tokens = of_sel.shape[0], cfg.n_blocks(seq_len), dk_cmp.shape[1]
    n_selected = n_blocks * (padded(cfg.l_sel) // LEAST)
    n_compressed = compressed.programs_of_sum(n_tokens, cfg)
    n_k, n_v = (x.numel() if cuts.window.pieces > 1 else 0 for x in (dk_win, dv_win))
    rest = sum(triton.cdiv(n, window.NUMBERS) for n in (n_k, n_v, dq.numel()))
    sums_kernel[n_selected + n_compressed + triton.cdiv(rest, pairs), pairs](
        *tensors, seq_len, dk_sel.shape[2], n_blocks, of_sel.shape[1], n_selected, n_tokens,
        n_keys, of_cmp.shape[2], of_cmp.shape[1], n_compressed, n_k, n_v, dq.numel(),
        cfg.d_k**-0.5, **sums_constants(cfg, cuts),
    )  # fmt: skip
