"""The selected branch: lists of blocks, forward, gradients of queries and of keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.grids import Kernel, Work
from nsa.attention.triton.tiles import Cut, Tile, choose_cut, expected_union, padded
from nsa.config import NSAConfig

_POINTERS = {
    "bits": "i32", "lse": "fp32", "delta": "fp32", "parts": "fp32", "ranges": "i64",
    "counts": "i32", "offsets": "i32", "readers": "i32", "piece_ends": "i32",
}  # fmt: skip


def kernels(cfg: NSAConfig, seq_len: int, pairs: int) -> Iterator[Kernel]:
    """Every kernel, as a call of this shape would launch it."""
    from nsa.attention.triton import columns, index, launch, rows

    cut, shape = choose_cut(cfg, seq_len, pairs), launch.shape_constants(cfg)
    walk = {"EVERY": cut.every}
    block, l_sel = cfg.n_blocks(seq_len), {"L_SEL": cfg.l_sel}
    yield Kernel(
        name="pack", function=index.pack_kernel, warps=4, stages=1, dots=False, pointers=_POINTERS,
        constants={**l_sel, "N_SEL": cfg.n_sel, "PLACES": 1 << (cfg.n_sel - 1).bit_length(),
                   "TOKENS": launch.TOKENS},
    )  # fmt: skip
    for fill in (False, True):
        yield Kernel(
            name=f"list{' (fill)' * fill}", function=index.list_kernel, warps=4, stages=1,
            dots=False, pointers=_POINTERS,
            constants={**l_sel, "TOKENS": launch.TOKENS_OF_A_LIST, "FILL": fill},
        )  # fmt: skip
    tiles: tuple[tuple[str, Any, Tile, dict[str, int]], ...] = (
        ("forward", rows.forward_kernel, cut.forward, walk),
        ("dq", rows.query_gradient_kernel, cut.query_gradient, walk),
        ("dk, dv", columns.piece_kernel, cut.key_gradient,
         {"PIECE": cut.piece, "BLOCKS": 1 << (block - 1).bit_length()}),
    )  # fmt: skip
    for name, function, tile, more in tiles:
        yield Kernel(
            name=f"{name}, {tile.rows} rows{', every block' * bool(more.get('EVERY'))}",
            function=function, warps=tile.warps, stages=tile.stages, pointers=_POINTERS,
            constants={**shape, **more, "ROWS": tile.rows},
        )  # fmt: skip
    rest = {name: value for name, value in shape.items() if name != "HEADS"}
    yield Kernel(name="sum", function=columns.sum_kernel, constants=rest, warps=4, stages=3,
                 dots=False, pointers=_POINTERS)  # fmt: skip


def work(cfg: NSAConfig, seq_len: int, size: int = 2) -> Iterator[Work]:
    """Tokens are taken to draw their blocks independently, as the cost model has it."""
    cut = choose_cut(cfg, seq_len, cfg.n_kv_groups)
    width = padded(cfg.d_k) + padded(cfg.d_v)
    block = padded(cfg.l_sel)
    queries, keys = (
        seq_len * n * (cfg.d_k + cfg.d_v) * size for n in (cfg.n_heads, cfg.n_kv_groups)
    )
    bits = cfg.n_kv_groups * -(-cfg.n_blocks(seq_len) // 32) * seq_len * 4
    sums = seq_len * cfg.n_heads * 4
    walked, walked_dq = (_walked(cfg, seq_len, t, cut) for t in (cut.forward, cut.query_gradient))
    # One product of a query with what it reads, or of probabilities with it, one number wide.
    needed = 2 * cfg.n_heads * _tokens_read(cfg, seq_len)
    yield Work(
        kernel="forward",
        backward=False,
        flops=walked * cut.forward.rows * block * width * 2,
        needed=needed * (cfg.d_k + cfg.d_v),
        least=queries + keys + bits + sums,
        most=queries + bits + sums + walked * block * width * size,
    )
    of_dq = walked_dq * cut.query_gradient.rows * block * (2 * padded(cfg.d_k) + padded(cfg.d_v))
    yield Work(
        kernel="dq",
        backward=True,
        flops=2 * of_dq,
        # Scores are needed once: the gradient of the keys makes them again.
        needed=needed * (2 * cfg.d_k + cfg.d_v),
        least=2 * queries + keys + bits + 2 * sums,
        most=2 * queries + bits + 2 * sums + walked_dq * block * width * size,
    )
    read = cfg.n_kv_groups * _read(cfg, seq_len)
    parts = cfg.n_kv_groups * min(cut.n_pieces, cfg.n_blocks(seq_len) + read / cut.piece) * block
    # The lists: bits are read twice, numbers of tokens written and read.
    rest = parts * width * 4 * 2 + 2 * bits + read * 4 * 2 + 2 * sums
    gathered = read * cfg.heads_per_group
    yield Work(
        kernel="dk, dv",
        backward=True,
        flops=2 * gathered * block * 2 * width,
        needed=needed * (cfg.d_k + cfg.d_v),
        least=queries + 2 * keys + rest,
        most=2 * keys + rest + gathered * (width * size + 8),
    )


def _walked(cfg: NSAConfig, seq_len: int, tile: Tile, cut: Cut) -> float:
    """Blocks that all tiles walk over; tokens that draw their own blocks, as the cost model has."""
    total = 0.0
    tiles = -(-seq_len * cfg.heads_per_group // tile.rows)
    for number in range(tiles):
        last = min(((number + 1) * tile.rows - 1) // cfg.heads_per_group, seq_len - 1)
        first = number * tile.rows // cfg.heads_per_group
        visible = cfg.n_blocks(last + 1)
        total += visible if cut.every else expected_union(cfg, last + 1, last - first + 1)
    return total * cfg.n_kv_groups


def _read(cfg: NSAConfig, seq_len: int) -> int:
    """Blocks that the tokens of a group read, one by one."""
    return sum(min(cfg.n_sel, t // cfg.l_sel + 1) for t in range(seq_len))


def _tokens_read(cfg: NSAConfig, seq_len: int) -> int:
    """Keys that the tokens read, one by one: whole blocks but for the current one."""
    return sum(
        min(t // cfg.l_sel, cfg.n_sel - 1) * cfg.l_sel + t % cfg.l_sel + 1 for t in range(seq_len)
    )
