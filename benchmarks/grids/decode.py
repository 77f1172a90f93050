"""Decoding: one token on a cache. No part of a training step."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.grids import Kernel, Work
from nsa.config import NSAConfig

# The compressed keys of a cache are kept in float32.
_POINTERS = {
    **dict.fromkeys(("k_cmp", "v_cmp", "scores", "parts", "bests", "totals"), "fp32"),
    "blocks": "i32",
}
_SAME = ("k_sel", "v_sel", "k_win", "v_win", "gates")


def kernels(cfg: NSAConfig, seq_len: int, pairs: int) -> Iterator[Kernel]:
    """The four launches of a step, in their order."""
    from nsa.attention.triton.decode import kernels as decode
    from nsa.attention.triton.decode import launch as decode_launch

    shape, tile = decode_launch.constants(cfg, cfg.n_blocks(seq_len)), decode_launch.tile(cfg)
    for name, function, dots in (
        ("compressed", decode.compressed_parts_kernel, False),
        ("choose", decode.choose_kernel, False),
        ("read", decode.read_kernel, True),
        ("finish", decode.finish_kernel, False),
    ):
        yield Kernel(
            name=f"decode {name}", function=function, warps=tile.warps, stages=tile.stages,
            dots=dots, pointers=_POINTERS, own=_SAME,
            constants={**shape[name], "ROWS": tile.rows},
        )  # fmt: skip


def work(cfg: NSAConfig, seq_len: int, size: int = 2) -> Iterator[Work]:
    """Of the last of `seq_len` tokens: bytes, as no product is waited for."""
    from nsa.attention.triton.decode.launch import part_keys, tile
    from nsa.attention.triton.tiles import padded

    n_keys, groups, rows = cfg.n_compressed(seq_len), cfg.n_kv_groups, tile(cfg).rows
    width, both = padded(cfg.d_k) + padded(cfg.d_v), cfg.d_k + cfg.d_v
    part = rows * (padded(cfg.d_v) + 2) * 4
    compressed = -(-n_keys // part_keys(n_keys))
    read = min(cfg.n_sel * cfg.l_sel, seq_len) + min(cfg.w, seq_len)
    others = cfg.n_sel + -(-min(cfg.w, seq_len) // padded(cfg.l_sel))
    scores = n_keys * cfg.heads_per_group * 4
    for name, keys, products, moved in (
        ("compressed", n_keys, n_keys, n_keys * both * 4 + scores + compressed * part),
        ("choose", 0, 0, scores + compressed * rows * 8),
        ("read", read, others * padded(cfg.l_sel), read * both * size + others * part),
        ("finish", 0, 0, (compressed + others) * part),
    ):
        yield Work(
            kernel=f"decode {name}",
            backward=False,
            flops=2 * groups * rows * products * width,
            needed=2 * cfg.n_heads * keys * both,
            least=groups * moved,
            most=groups * moved,
        )
