"""The compressed branch: forward, gradients of queries and of keys, and the choice of blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.grids import Kernel, Work
from nsa.attention.triton.compressed.tiles import FEW, TERMS, choose_compressed_cut, steps
from nsa.attention.triton.tiles import Tile, padded
from nsa.config import NSAConfig

# What the branch gives and its gradients are float32 in every call, and keys where they choose.
_POINTERS = {
    **dict.fromkeys(("out", "grad", "dk", "dv", "lse", "exact_lse", "delta", "parts"), "fp32"),
    "blocks": "i64",
}
_OWN = ("terms", "rounded_grad")
# Bytes of a number there.
_WIDE = 4


def kernels(cfg: NSAConfig, seq_len: int, pairs: int) -> Iterator[Kernel]:
    """Every kernel, as a call of this shape in bf16 would launch it."""
    import torch

    from nsa.attention.triton.compressed import columns as compressed_columns
    from nsa.attention.triton.compressed import keys as compressed_keys
    from nsa.attention.triton.compressed import launch as compressed_launch
    from nsa.attention.triton.compressed import rows as compressed_rows
    from nsa.attention.triton.compressed import top

    cut = choose_compressed_cut(cfg, seq_len, pairs)
    shape = compressed_launch.compressed_constants(cfg)
    exact = {"KEYS": cut.keys, "TERMS": compressed_launch.n_terms(torch.bfloat16)}
    tiles: tuple[tuple[str, Any, Tile, dict[str, int]], ...] = (
        ("forward", compressed_rows.compressed_kernel, cut.forward, exact),
        ("dq", compressed_rows.compressed_query_gradient_kernel, cut.query_gradient,
         {"KEYS": cut.rounded_keys}),
        ("dk, dv", compressed_columns.compressed_piece_kernel, cut.key_gradient,
         {"KEYS": cut.owned, "PIECE": cut.piece}),
    )  # fmt: skip
    for name, function, tile, more in tiles:
        yield Kernel(
            name=f"compressed {name}, {tile.rows} rows", function=function, warps=tile.warps,
            stages=tile.stages, pointers=_POINTERS, own=_OWN,
            constants={**shape, **more, "ROWS": tile.rows},
        )  # fmt: skip
    rest = {name: value for name, value in shape.items() if name != "HEADS"}
    yield Kernel(
        name="compressed sum", function=compressed_columns.compressed_sum_kernel, warps=4,
        stages=3, dots=False, pointers=_POINTERS,
        constants={**rest, "KEYS": cut.owned, "PIECE": cut.piece, "FEW": FEW},
    )  # fmt: skip
    yield Kernel(
        name="terms of keys", function=compressed_keys.terms_kernel, warps=4, stages=3, dots=False,
        pointers={"k": "fp32", "v": "fp32"}, own=(*_OWN, "values"),
        constants={name: shape[name] for name in ("D_K", "D_V", "WIDTH_K", "WIDTH_V")}
        | {"TERMS": exact["TERMS"], "KEYS": FEW, "VALUES": True},
    )  # fmt: skip
    yield Kernel(
        name=f"top blocks, {cut.top.rows} tokens", function=top.top_kernel, warps=cut.top.warps,
        stages=cut.top.stages, pointers=_POINTERS, own=_OWN,
        constants={**compressed_launch.top_constants(cfg, torch.bfloat16),
                   "TOKENS": cut.top.rows, "BLOCKS": cut.blocks},
    )  # fmt: skip


def work(cfg: NSAConfig, seq_len: int, size: int = 2) -> Iterator[Work]:
    """Counted tile by tile, nothing drawn or assumed. A score that chooses is TERMS products."""
    cut, groups = choose_compressed_cut(cfg, seq_len, cfg.n_kv_groups), cfg.n_kv_groups
    wide_k, wide_v, times = padded(cfg.d_k), padded(cfg.d_v), TERMS["bfloat16"]
    n_keys, heads = cfg.n_compressed(seq_len), cfg.heads_per_group
    queries = seq_len * cfg.n_heads
    exact_k, exact_v = (n_keys * groups * d * _WIDE for d in (cfg.d_k, cfg.d_v))
    # Keys and values, rounded: each kernel's own ones are made before it. Terms are of keys alone.
    keys = n_keys * groups * (cfg.d_k + cfg.d_v) * size
    terms = exact_k + n_keys * groups * cfg.d_k * times * size
    rounding = exact_k + exact_v + keys
    sums = queries * _WIDE
    # One product of a query with every key it sees, one number wide.
    needed = 2 * cfg.n_heads * sum(cfg.n_compressed(t + 1) for t in range(seq_len))
    tiles = groups * _walked(cfg, seq_len, cut.forward.rows, cut.keys)
    moved = queries * (cfg.d_k * size + cfg.d_v * _WIDE) + 2 * sums
    yield Work(
        kernel="compressed forward",
        backward=False,
        flops=2 * tiles * cut.forward.rows * cut.keys * (times * wide_k + wide_v),
        needed=needed * (cfg.d_k + cfg.d_v),
        least=moved + terms + exact_v + n_keys * groups * cfg.d_v * size,
        most=moved + terms + exact_v + tiles * cut.keys * (wide_k * times + wide_v) * size,
    )
    tokens = cut.top.rows
    lasts = (min(first + tokens, seq_len) - 1 for first in range(0, seq_len, tokens))
    crowded = (last for last in lasts if last >= cfg.n_sel * cfg.l_sel)
    runs = sum(-(-cfg.n_blocks(last + 1) // cut.blocks) for last in crowded)
    columns = cut.blocks * steps(cfg)
    chosen = seq_len * groups * cfg.n_sel * 8
    yield Work(
        kernel="top blocks",
        backward=False,
        flops=2 * groups * runs * heads * tokens * columns * times * wide_k,
        # The scores of the forward pass would do, had they been kept.
        needed=0,
        least=queries * cfg.d_k * size + sums + terms + chosen,
        most=chosen + terms + groups * runs * columns * wide_k * times * size
        + groups * runs * heads * tokens * (wide_k * size + _WIDE),
    )  # fmt: skip
    tiles = groups * _walked(cfg, seq_len, cut.query_gradient.rows, cut.rounded_keys)
    # The gradient of the output is rounded for the next kernel.
    moved = queries * (2 * cfg.d_k * size + cfg.d_v * (2 * _WIDE + size)) + 2 * sums
    yield Work(
        kernel="compressed dq",
        backward=True,
        flops=2 * tiles * cut.query_gradient.rows * cut.rounded_keys * (2 * wide_k + wide_v),
        # Scores are needed once: the gradient of the keys makes them again.
        needed=needed * (2 * cfg.d_k + cfg.d_v),
        least=moved + rounding + keys,
        most=moved + rounding + tiles * cut.rounded_keys * (wide_k + wide_v) * size,
    )
    rows, parts = _columns(cfg, seq_len)
    # Parts are written and read again.
    made = groups * parts * cut.owned * (wide_k + wide_v) * _WIDE * 2 + exact_k + exact_v
    rows *= groups
    yield Work(
        kernel="compressed dk, dv",
        backward=True,
        flops=2 * rows * cut.owned * 2 * (wide_k + wide_v),
        needed=needed * (cfg.d_k + cfg.d_v),
        least=queries * (cfg.d_k + cfg.d_v) * size + 2 * sums + keys + made,
        most=rows * ((wide_k + wide_v) * size + 2 * _WIDE) + keys + made,
    )


def _walked(cfg: NSAConfig, seq_len: int, rows: int, keys: int) -> int:
    """Tiles of keys that all tiles of a group's queries walk over."""
    heads = cfg.heads_per_group
    lasts = (
        min(((n + 1) * rows - 1) // heads, seq_len - 1) for n in range(-(-seq_len * heads // rows))
    )
    return sum(-(-cfg.n_compressed(last + 1) // keys) for last in lasts)


def _columns(cfg: NSAConfig, seq_len: int) -> tuple[int, int]:
    """Rows that all tiles of a group's keys walk over, padded to tiles of them; parts summed up."""
    cut = choose_compressed_cut(cfg, seq_len, cfg.n_kv_groups)
    total = parts = 0
    for tile in range(cut.n_tiles(cfg.n_compressed(seq_len))):
        first = tile * cut.owned * cfg.d + cfg.l - 1
        for piece in range(first // cut.piece, cut.n_pieces(seq_len)):
            tokens = min((piece + 1) * cut.piece, seq_len) - max(piece * cut.piece, first)
            total += -(-tokens * cfg.heads_per_group // cut.key_gradient.rows)
            parts += 1
    return total * cut.key_gradient.rows, parts
