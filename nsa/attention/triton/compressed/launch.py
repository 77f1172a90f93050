"""Starts the kernels of the compressed branch, and those that own keys; never asks the device.

The gradients of keys need no atomic operation. A compressed key is seen by every token after it.
The tokens are cut into pieces: a program adds up one piece for a tile of keys, and a second kernel
adds the pieces in order. Every number has one program that writes it, so that equal inputs give
equal bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.attention.triton.compressed.rows import (
    compressed_kernel,
    compressed_query_gradient_kernel,
    seen_keys,
    terms_kernel,
)
from nsa.attention.triton.compressed.top import top_kernel
from nsa.attention.triton.launch import (
    device_of,
    head_constants,
    how,
    inner,
    results_of,
    scale_of,
    strides_of,
    tuned,
)
from nsa.attention.triton.rows import (
    give_keys,
    load_keys,
    load_rows,
    padded,
    store_keys,
    store_part,
    sum_parts,
)
from nsa.attention.triton.tiles import LEAST, TERMS, choose_compressed_cut
from nsa.config import NSAConfig


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


@triton.jit
def compressed_sum_kernel(
    parts, dk, dv, groups, n_keys, n_pieces, n_tiles, dk_scale,
    D_K: tl.constexpr, D_V: tl.constexpr,
    L: tl.constexpr, STRIDE: tl.constexpr, KEYS: tl.constexpr, PIECE: tl.constexpr,
    FEW: tl.constexpr,
):  # fmt: skip
    """dk [B,N,G,D_K] and dv [B,N,G,D_V] of FEW keys: the sum over the pieces, in order."""
    key = tl.program_id(0) * FEW + tl.arange(0, FEW)
    pair = tl.program_id(1).to(tl.int64)
    batch, group = pair // groups, pair % groups
    tile = tl.program_id(0) * FEW // KEYS
    first = (tile * KEYS * STRIDE + L - 1) // PIECE
    number = (pair * n_tiles + tile) * n_pieces
    sum_k, sum_v = sum_parts(parts, number, first, n_pieces, key - tile * KEYS, KEYS, D_K, D_V)
    flat = (batch * n_keys + key.to(tl.int64)) * groups + group
    store_keys(dk, dv, sum_k, sum_v, flat, key < n_keys, dk_scale, D_K, D_V)


def forward(q: Tensor, k: Tensor, v: Tensor, cfg: NSAConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Output float32 [B,S,G,h,Dv] and log-sum-exp to the base 2 [B*G, S*h] of q [B,S,G,h,Dk].

    k [B,N,G,Dk] and v [B,N,G,Dv]: compressed, float32. The first log-sum-exp is of keys rounded to
    the type of q, for `backward`, the second of exact ones, for `top_blocks`.
    """
    batch, seq_len, groups, heads = q.shape[:4]
    out, lse = results_of(q, cfg, k.dtype)
    q, (terms, v) = inner(q), terms_of(k, v, q.dtype, n_terms(q.dtype))
    exact_lse = torch.empty_like(lse)
    cut = tuned("compressed", choose_compressed_cut(cfg, seq_len, batch * groups), cfg, q)
    with device_of(q):
        compressed_kernel[triton.cdiv(seq_len * heads, cut.forward.rows), batch * groups](
            q, terms, v, out, lse, exact_lse, seq_len, groups, k.shape[1], scale_of(cfg),
            *strides_of(q, terms, v), **compressed_constants(cfg), TERMS=n_terms(q.dtype),
            KEYS=cut.keys, **how(cut.forward),
        )  # fmt: skip
    return out, lse, exact_lse


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cfg: NSAConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q [B,S,G,h,Dk], k [B,N,G,Dk] and v [B,N,G,Dv]; equal bits for equal inputs."""
    batch, seq_len, groups, heads = q.shape[:4]
    pairs, n_keys = batch * groups, k.shape[1]
    q, k, v = (inner(x) for x in (q, k, v))
    grad, out = grad.contiguous(), out.contiguous()
    cut = tuned("compressed", choose_compressed_cut(cfg, seq_len, pairs), cfg, q)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    delta, rounded_grad = torch.empty_like(lse), torch.empty_like(grad, dtype=q.dtype)
    # Once here, not in each tile that reads them.
    terms, v = terms_of(k, v, q.dtype, 1)
    k = terms[:, :, :, 0]
    n_tiles, n_pieces = cut.n_tiles(n_keys), cut.n_pieces(seq_len)
    parts_shape = (pairs, n_tiles, n_pieces, cut.owned, padded(cfg.d_k) + padded(cfg.d_v))
    parts = torch.empty(parts_shape, dtype=torch.float32, device=q.device)
    strides, shape, scale = strides_of(q, k, v), compressed_constants(cfg), scale_of(cfg)
    with device_of(q):
        rows = triton.cdiv(seq_len * heads, cut.query_gradient.rows)
        compressed_query_gradient_kernel[rows, pairs](
            q, k, v, out, lse, grad, dq, delta, rounded_grad, seq_len, groups, n_keys, scale,
            cfg.d_k**-0.5, *strides, **shape, KEYS=cut.rounded_keys, **how(cut.query_gradient),
        )  # fmt: skip
        if n_keys:
            compressed_piece_kernel[n_pieces, n_tiles, pairs](
                q, k, v, rounded_grad, lse, delta, parts, seq_len, groups, n_keys, n_pieces,
                scale, *strides, **shape, KEYS=cut.owned, PIECE=cut.piece,
                **how(cut.key_gradient),
            )  # fmt: skip
            sums = {name: shape[name] for name in shape if name != "HEADS"}
            compressed_sum_kernel[triton.cdiv(n_keys, LEAST), pairs](
                parts, dk, dv, groups, n_keys, n_pieces, n_tiles, cfg.d_k**-0.5,
                **sums, KEYS=cut.owned, PIECE=cut.piece, FEW=LEAST,
            )  # fmt: skip
    return dq, dk, dv


def top_blocks(q: Tensor, k: Tensor, lse: Tensor, cfg: NSAConfig) -> Tensor:
    """Blocks int64 [B,S,G,n_sel] that q [B,S,G,h,Dk] selects by compressed keys k [B,N,G,Dk].

    lse: the exact log-sum-exp of `forward`.
    """
    batch, seq_len, groups = q.shape[:3]
    q, (terms, _) = inner(q), terms_of(k, None, q.dtype, n_terms(q.dtype))
    shape = (batch, seq_len, groups, cfg.n_sel)
    blocks = torch.empty(shape, dtype=torch.int64, device=q.device)
    cut = tuned("top", choose_compressed_cut(cfg, seq_len, batch * groups), cfg, q)
    tile = how(cut.top)
    with device_of(q):
        top_kernel[triton.cdiv(seq_len, cut.top.rows), batch * groups](
            q, terms, lse, blocks, seq_len, groups, q.shape[3], k.shape[1], scale_of(cfg),
            *q.stride()[:4], *terms.stride()[:3], **top_constants(cfg, q.dtype),
            TOKENS=tile.pop("ROWS"), BLOCKS=cut.blocks, **tile,
        )  # fmt: skip
    return blocks


def terms_of(
    k: Tensor, v: Tensor | None, dtype: torch.dtype, n_terms: int
) -> tuple[Tensor, Tensor]:
    """Keys [B,N,G,Dk] as sums of numbers of a type [B,N,G,terms,Dk], the largest first.

    And values [B,N,G,Dv] rounded to the type; without `v` nothing of use.
    """
    k, whole = inner(k), inner(k if v is None else v)
    batch, n_keys, groups, d_k = k.shape
    d_v = whole.shape[-1]
    terms = torch.empty(batch, n_keys, groups, n_terms, d_k, dtype=dtype, device=k.device)
    values = terms if v is None else torch.empty(whole.shape, dtype=dtype, device=k.device)
    if n_keys:
        with device_of(k):
            terms_kernel[triton.cdiv(n_keys, LEAST), batch * groups](
                k, whole, terms, values, groups, n_keys, *k.stride()[:3], *whole.stride()[:3],
                D_K=d_k, D_V=d_v, TERMS=n_terms, KEYS=LEAST, VALUES=v is not None,
            )  # fmt: skip
    return terms, values


def n_terms(dtype: torch.dtype) -> int:
    """Numbers of a type that add up to a key, where its scores choose blocks."""
    return TERMS[str(dtype).removeprefix("torch.")]


def compressed_constants(cfg: NSAConfig) -> dict[str, int]:
    """What the kernels of attention are compiled for, beside how they are cut."""
    return head_constants(cfg) | {"L": cfg.l, "STRIDE": cfg.d}


def top_constants(cfg: NSAConfig, dtype: torch.dtype) -> dict[str, int]:
    """What the selection is compiled for, beside how it is cut."""
    shape = {"D_K": cfg.d_k, "L": cfg.l, "STRIDE": cfg.d, "L_SEL": cfg.l_sel, "N_SEL": cfg.n_sel}
    return shape | {"TERMS": n_terms(dtype)}
