"""Starts the kernels that serve several branches: a layer's core in 4 launches and 7 back.

Forward: the window with the pooled keys; the compressed branch; the choice of blocks with their
bits; the selected branch with the gated sum. Backward: two that list who reads each block; the
gradient of the queries; three that own keys, each cut as it is best by itself; all sums. Where
blocks own the work of the selected branch its own kernels take their launches beside these, a run
of positions after the other. Nothing asks the device for a number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from nsa.attention.triton import LEAST, CompressedCut, SelectedCut, Tile, WindowCut, padded, window
from nsa.attention.triton import compressed as compressed
from nsa.attention.triton import selected as selected
from nsa.attention.triton.core.kernels import first_kernel, queries_kernel, sums_kernel
from nsa.attention.triton.launch import (
    cut_of,
    device_of,
    how,
    inner,
    results_of,
    scale_of,
    strides_of,
)
from nsa.config import NSAConfig


def window_and_terms(
    q: Tensor, k_win: Tensor, v_win: Tensor, k_cmp: Tensor, v_cmp: Tensor, cfg: NSAConfig
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The window's output [B,S,G,h,Dv] and log-sum-exp; compressed keys and values (`pool`)."""
    batch, seq_len, groups, heads = q.shape[:4]
    cut: WindowCut = cut_of("window", q, cfg)
    q, k_win, v_win, k_cmp, v_cmp = (inner(x) for x in (q, k_win, v_win, k_cmp, v_cmp))
    out, lse = results_of(q, cfg, q.dtype)
    terms, values = compressed.room_for_terms(k_cmp, q.dtype, cfg)
    n_keys = terms.shape[1]
    programs = triton.cdiv(seq_len * heads, cut.forward.rows) + n_keys
    with device_of(q):
        first_kernel[programs, batch * groups](
            q, k_win, v_win, out, lse, k_cmp, v_cmp, terms, values, seq_len, groups, n_keys,
            min(cfg.w, seq_len), scale_of(cfg), *strides_of(q, k_win, v_win), *k_cmp.stride()[:3],
            *v_cmp.stride()[:3], **first_constants(cfg, q.dtype, cut), **how(cut.forward),
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
        return cls(**{name: cut_of(name, q, cfg) for name in ("compressed", "selected", "window")})

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
        inner(x) for x in (q, gates, k_sel, v_sel, k_win, v_win)
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
    with device_of(q):
        lists = selected.lists_of(bits, cfg, cuts.selected)
        queries_kernel[3 * triton.cdiv(seq_len * heads, cuts.queries.rows), pairs](
            q, grad, gates, parts_q, d_gates, sums, delta, rounded, values, cmp, cmp_lse,
            k_sel, v_sel, bits, sel, sel_lse, k_win, v_win, win, win_lse, seq_len, groups,
            terms.shape[1], bits.shape[1], min(cfg.w, seq_len), scale_of(cfg), cfg.d_k**-0.5,
            *q.stride()[:4], *gates.stride()[:3], *rounded.stride()[:3], *values.stride()[:3],
            *k_sel.stride()[:3], *v_sel.stride()[:3], *k_win.stride()[:3], *v_win.stride()[:3],
            **queries_constants(cfg, cuts), **how(cuts.queries),
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
