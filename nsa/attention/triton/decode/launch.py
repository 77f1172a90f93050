"""Starts the kernels of decoding, and what torch sees of them: `nsa::decode`.

Four launches for a token; their grids depend on lengths only, which the host knows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nsa.attention.triton.tiles import LEAST, Tile, padded
from nsa.config import FORCED_LOCAL_BLOCKS, NSAConfig

if TYPE_CHECKING:
    from nsa.attention.branches import Branches

# Parts of the compressed keys: what one program puts together at once.
_PARTS = 32


def tile(cfg: NSAConfig) -> Tile:
    """The heads of a group, as many as tensor cores multiply at least."""
    return Tile(rows=padded(cfg.heads_per_group), warps=4, stages=2)


def part_keys(n_keys: int) -> int:
    """Compressed keys of one part: at most `_PARTS` parts, whole tiles of 64."""
    return 64 * max(1, -(-n_keys // (64 * _PARTS)))


def constants(cfg: NSAConfig, n_blocks: int) -> dict[str, dict[str, int]]:
    """What each kernel is compiled for."""
    rows = {"HEADS": cfg.heads_per_group}
    value = {"D_V": cfg.d_v, "WIDTH_V": padded(cfg.d_v)}
    wide = {**rows, **value, "D_K": cfg.d_k, "WIDTH_K": padded(cfg.d_k)}
    chosen = {"N_SEL": cfg.n_sel}
    return {
        # Found with the assembler: keys of float32 that are 128 wide spill where there are more.
        "compressed": {**wide, "KEYS": LEAST if max(wide["WIDTH_K"], wide["WIDTH_V"]) > 64 else 64},
        "choose": {
            **rows, **chosen, "PER_BLOCK": cfg.l // cfg.d, "PER_SEL": cfg.l_sel // cfg.d,
            "LOCAL": FORCED_LOCAL_BLOCKS, "PARTS": _PARTS,
            "BLOCKS": max(LEAST, 1 << (n_blocks - 1).bit_length()),
        },
        "read": {**wide, **chosen, "L_SEL": cfg.l_sel, "KEYS": padded(cfg.l_sel)},
        "finish": {**rows, **value, **chosen},
    }  # fmt: skip


def _floats(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


@torch.library.custom_op("nsa::decode", mutates_args=())
def decode(
    q: Tensor, gates: Tensor, k_cmp: Tensor, v_cmp: Tensor, k_sel: Tensor, v_sel: Tensor,
    k_win: Tensor, v_win: Tensor, l: int, d: int, l_sel: int, n_sel: int,  # noqa: E741
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output [B,1,H,Dv] and blocks int32 [B*G, n_sel] of q [B,1,H,Dk] on a cache [B,T,G,D]."""
    import triton

    from nsa.attention.triton.decode.kernels import (
        choose_kernel,
        compressed_parts_kernel,
        finish_kernel,
        read_kernel,
    )
    from nsa.attention.triton.launch import device_of, how, inner, scale_of

    batch, groups, d_k = q.shape[0], k_sel.shape[2], q.shape[3]
    cfg = NSAConfig(dim=1, n_heads=q.shape[2], n_kv_groups=groups, d_k=d_k, d_v=v_sel.shape[3],
                    l=l, d=d, l_sel=l_sel, n_sel=n_sel)  # fmt: skip
    length, near, n_keys = k_sel.shape[1], k_win.shape[1], k_cmp.shape[1]
    q, gates, k_cmp, v_cmp = inner(q), inner(gates), inner(k_cmp), inner(v_cmp)
    read = [inner(x.to(q.dtype)) for x in (k_sel, v_sel, k_win, v_win)]
    shape, per_part = constants(cfg, cfg.n_blocks(length)), part_keys(n_keys)
    compressed = triton.cdiv(n_keys, per_part)
    others = n_sel + triton.cdiv(near, shape["read"]["KEYS"])
    pairs, n_parts, rows = batch * groups, compressed + others, tile(cfg).rows
    scores = _floats(q, pairs, cfg.heads_per_group, n_keys)
    parts = _floats(q, pairs, n_parts, rows, shape["read"]["WIDTH_V"])
    bests, totals = (_floats(q, pairs, rows, n_parts) for _ in range(2))
    blocks = torch.empty(pairs, n_sel, dtype=torch.int32, device=q.device)
    out = torch.empty(batch, 1, q.shape[2], cfg.d_v, dtype=q.dtype, device=q.device)
    by_head = (q.stride(0), q.stride(2))
    with device_of(q):
        options = how(tile(cfg))
        if compressed:
            compressed_parts_kernel[compressed, pairs](
                q, k_cmp, v_cmp, scores, parts, bests, totals, groups, n_keys, n_parts, per_part,
                scale_of(cfg), *by_head, *k_cmp.stride()[:3], *v_cmp.stride()[:3],
                **shape["compressed"], **options,
            )  # fmt: skip
        choose_kernel[pairs,](
            scores, bests, totals, blocks, n_keys, n_parts, compressed, (length - 1) // l_sel,
            **shape["choose"], **options,
        )  # fmt: skip
        read_kernel[others, pairs](
            q, *read, blocks, parts, bests, totals, groups, length, near, compressed, n_parts,
            scale_of(cfg), *by_head, *(n for x in read for n in x.stride()[:3]), **shape["read"],
            **options,
        )  # fmt: skip
        finish_kernel[pairs,](
            parts, bests, totals, gates, out, groups, compressed, n_parts, gates.stride(0),
            gates.stride(2), **shape["finish"], **options,
        )  # fmt: skip
    return out, blocks


@decode.register_fake
def _(
    q: Tensor, gates: Tensor, k_cmp: Tensor, v_cmp: Tensor, k_sel: Tensor, v_sel: Tensor,
    k_win: Tensor, v_win: Tensor, l: int, d: int, l_sel: int, n_sel: int,  # noqa: E741
) -> tuple[Tensor, Tensor]:  # fmt: skip
    batch, heads, groups = q.shape[0], q.shape[2], k_sel.shape[2]
    blocks = q.new_empty(batch * groups, n_sel, dtype=torch.int32)
    return q.new_empty(batch, 1, heads, v_sel.shape[3]), blocks


def decode_token(x: Branches, cfg: NSAConfig) -> tuple[Tensor, Tensor]:
    """Output [B,1,H,Dv] and blocks [B,1,G,n_sel], forced ones first, of the cache's newest token.

    x.k_cmp, x.v_cmp: the compressed keys and values that it sees [B,N,G,D]; x.k_win, x.v_win: those
    of the window.
    """
    out, blocks = decode(
        x.q, x.gates, x.k_cmp, x.v_cmp, x.k_sel, x.v_sel, x.k_win, x.v_win,
        cfg.l, cfg.d, cfg.l_sel, cfg.n_sel,
    )  # fmt: skip
    return out, blocks.view(x.q.shape[0], 1, cfg.n_kv_groups, cfg.n_sel).long()
