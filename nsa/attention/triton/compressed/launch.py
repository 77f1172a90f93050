"""Starts the kernels of the compressed branch; never asks the device for a number."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from nsa.attention.triton.compressed.columns import compressed_piece_kernel, compressed_sum_kernel
from nsa.attention.triton.compressed.rows import (
    compressed_kernel,
    compressed_query_gradient_kernel,
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
from nsa.attention.triton.tiles import (
    LEAST,
    TERMS,
    choose_compressed_cut,
    padded,
)
from nsa.config import NSAConfig


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
