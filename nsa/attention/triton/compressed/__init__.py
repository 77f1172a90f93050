"""Starts the compressed branch, the choice of blocks, and the kernel that owns keys.

The gradients of keys need no atomic operation. A compressed key is seen by every token after it.
The tokens are cut into pieces: a program adds up one piece for a tile of keys, and `sums_kernel`
adds the pieces in order. Every number has one program that writes it, so that equal inputs give
equal bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.attention.triton import LEAST, TERMS, CompressedCut, launch, room_for_bits
from nsa.attention.triton.compressed.rows import compressed_kernel, seen_keys
from nsa.attention.triton.compressed.top import top_kernel
from nsa.attention.triton.rows import give_keys, load_keys, load_rows, padded, store_part
from nsa.config import NSAConfig

# Tokens that a program of pooling reads at once: a block of the production shape.
TOKENS = 32


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


def attend(
    q: Tensor, terms: Tensor, values: Tensor, cfg: NSAConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Output float32 [B,S,G,h,Dv] and two log-sum-exps to the base 2 [B*G, S*h] of q [B,S,G,h,Dk].

    terms, values: as `pool` makes them. The first log-sum-exp is of keys rounded to the type of q,
    for the gradients, the last of exact ones, for `top_blocks`.
    """
    batch, seq_len, groups, heads = q.shape[:4]
    out, lse = launch.results_of(q, cfg, torch.float32)
    q = launch.inner(q)
    exact_lse = torch.empty_like(lse)
    cut: CompressedCut = launch.cut_of("compressed", q, cfg)
    with launch.device_of(q):
        compressed_kernel[triton.cdiv(seq_len * heads, cut.forward.rows), batch * groups](
            q, terms, values, out, lse, exact_lse, seq_len, groups, terms.shape[1],
            launch.scale_of(cfg), *launch.strides_of(q, terms, values),
            **compressed_constants(cfg), TERMS=n_terms(q.dtype), KEYS=cut.keys,
            **launch.how(cut.forward),
        )  # fmt: skip
    return out, lse, exact_lse


def give_keys_of_compressed(
    q: Tensor, rounded: Tensor, values: Tensor, grad: Tensor, lse: Tensor, delta: Tensor,
    cfg: NSAConfig, cut: CompressedCut,
) -> Tensor:  # fmt: skip
    """Start the kernel that owns compressed keys; parts [B*G, tiles, pieces, keys, widths]."""
    seq_len, groups, n_keys = q.shape[1], q.shape[2], rounded.shape[1]
    pairs, n_tiles, n_pieces = q.shape[0] * groups, cut.n_tiles(n_keys), cut.n_pieces(seq_len)
    parts_shape = (pairs, n_tiles, n_pieces, cut.owned, padded(cfg.d_k) + padded(cfg.d_v))
    parts = torch.empty(parts_shape, dtype=torch.float32, device=q.device)
    if n_keys:
        compressed_piece_kernel[n_pieces, n_tiles, pairs](
            q, rounded, values, grad, lse, delta, parts, seq_len, groups, n_keys, n_pieces,
            launch.scale_of(cfg), *launch.strides_of(q, rounded, values),
            **compressed_constants(cfg), KEYS=cut.owned, PIECE=cut.piece,
            **launch.how(cut.key_gradient),
        )  # fmt: skip
    return parts


def programs_of_sum(n_tokens: int, cfg: NSAConfig) -> int:
    """Of a pair, that add up the parts for so many tokens."""
    programs: int = triton.cdiv(n_tokens, LEAST * pooled(cfg)[1])
    return programs


def top_blocks(q: Tensor, terms: Tensor, lse: Tensor, cfg: NSAConfig) -> tuple[Tensor, Tensor]:
    """Blocks int64 [B,S,G,n_sel] that q [B,S,G,h,Dk] selects by compressed keys, and their bits.

    Bits int32 [B*G, words, S]: of word w, bit b of a token says whether it selects 32*w + b.
    lse: the exact one.
    """
    batch, seq_len, groups = q.shape[:3]
    q = launch.inner(q)
    shape = (batch, seq_len, groups, cfg.n_sel)
    blocks = torch.empty(shape, dtype=torch.int64, device=q.device)
    bits = room_for_bits(q, cfg.l_sel)
    cut: CompressedCut = launch.cut_of("top", q, cfg)
    tile = launch.how(cut.top)
    with launch.device_of(q):
        top_kernel[triton.cdiv(seq_len, cut.top.rows), batch * groups](
            q, terms, lse, blocks, bits, seq_len, groups, q.shape[3], terms.shape[1], bits.shape[1],
            launch.scale_of(cfg), *q.stride()[:4], *terms.stride()[:3],
            **top_constants(cfg, q.dtype), TOKENS=tile.pop("ROWS"), BLOCKS=cut.blocks, **tile,
        )  # fmt: skip
    return blocks, bits


def room_for_terms(k: Tensor, dtype: torch.dtype, cfg: NSAConfig) -> tuple[Tensor, Tensor]:
    """For compressed keys as sums of numbers of a type [B,N,G,terms,Dk], and values [B,N,G,Dv].

    k: [B,S,G,Dk], or compressed already [B,N,G,Dk].
    """
    batch, n_tokens, groups = k.shape[:3]
    n_keys = cfg.n_compressed(n_tokens) if cfg.phi == "avg" else n_tokens
    shape = (batch, n_keys, groups)
    terms = torch.empty(*shape, n_terms(dtype), cfg.d_k, dtype=dtype, device=k.device)
    return terms, torch.empty(*shape, cfg.d_v, dtype=dtype, device=k.device)


def pool_constants(cfg: NSAConfig, dtype: torch.dtype) -> dict[str, int]:
    """What the kernel that pools is compiled for."""
    length, stride = pooled(cfg)
    tokens = min(TOKENS, triton.next_power_of_2(length))
    told = {"L": length, "STRIDE": stride, "D_K": cfg.d_k, "D_V": cfg.d_v, "TOKENS": tokens}
    return told | {"TERMS": n_terms(dtype)}


def sum_constants(cfg: NSAConfig, cut: CompressedCut) -> dict[str, int]:
    """What the kernel is compiled for that adds up the gradients of keys."""
    length, stride = pooled(cfg)
    shape = {"D_K": cfg.d_k, "D_V": cfg.d_v, "L": cfg.l, "STRIDE": cfg.d, "FEW": LEAST}
    return shape | {"KEYS": cut.owned, "PIECE": cut.piece, "POOL": length, "POOL_STRIDE": stride}


def pooled(cfg: NSAConfig) -> tuple[int, int]:
    """Tokens of a block, and from one to the next, as the kernels make it."""
    return (cfg.l, cfg.d) if cfg.phi == "avg" else (1, 1)


def n_terms(dtype: torch.dtype) -> int:
    """Numbers of a type that add up to a key, where its scores choose blocks."""
    return TERMS[str(dtype).removeprefix("torch.")]


def compressed_constants(cfg: NSAConfig) -> dict[str, int]:
    """What the kernels of attention are compiled for, beside how they are cut."""
    return launch.head_constants(cfg) | {"L": cfg.l, "STRIDE": cfg.d}


def top_constants(cfg: NSAConfig, dtype: torch.dtype) -> dict[str, int]:
    """What the selection is compiled for, beside how it is cut."""
    shape = {"D_K": cfg.d_k, "L": cfg.l, "STRIDE": cfg.d, "L_SEL": cfg.l_sel, "N_SEL": cfg.n_sel}
    return shape | {"TERMS": n_terms(dtype)}
