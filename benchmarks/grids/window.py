"""The sliding window: forward, gradients of queries and of keys."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.grids import Kernel, Work
from nsa.attention.triton.tiles import Tile, padded
from nsa.attention.triton.window.tiles import choose_window_cut
from nsa.config import NSAConfig

_POINTERS = {"lse": "fp32", "delta": "fp32"}
# Where walks are in pieces.
_PARTS = dict.fromkeys(("dk", "dv"), "fp32")
_WIDE = 4


def kernels(cfg: NSAConfig, seq_len: int, pairs: int) -> Iterator[Kernel]:
    """Every kernel; of keys alone, by whether walks are in pieces."""
    from nsa.attention.triton.window import keys as window_keys
    from nsa.attention.triton.window import launch as window_launch
    from nsa.attention.triton.window import rows as window

    cut = choose_window_cut(cfg, seq_len, pairs)
    shape = window_launch.constants(cfg, cut)
    in_pieces = cut.pieces > 1
    for name, function, tile, more in (
        ("window forward", window.window_kernel, cut.forward, {}),
        ("window dq", window.window_query_kernel, cut.query_gradient, {}),
        (
            f"window dk, dv{', in pieces' * in_pieces}", window_keys.window_keys_kernel,
            cut.key_gradient, _PARTS if in_pieces else {},
        ),
    ):  # fmt: skip
        yield Kernel(
            name=f"{name}, {tile.rows} rows", function=function, warps=tile.warps,
            stages=tile.stages, pointers={**_POINTERS, **more},
            constants={**shape, "ROWS": tile.rows},
        )  # fmt: skip
    if in_pieces:
        yield Kernel(
            name="window sum", function=window_keys.window_sum_kernel, warps=4, stages=3,
            dots=False, pointers={"parts_k": "fp32", "parts_v": "fp32"},
            constants={"PIECES": cut.pieces, "NUMBERS": window_launch.NUMBERS},
        )  # fmt: skip


def work(cfg: NSAConfig, seq_len: int, size: int = 2) -> Iterator[Work]:
    """Counted tile by tile: nothing here is drawn or assumed."""
    groups = cfg.n_kv_groups
    cut = choose_window_cut(cfg, seq_len, groups)
    wide_k, wide_v = padded(cfg.d_k), padded(cfg.d_v)
    queries, keys = (seq_len * n * (cfg.d_k + cfg.d_v) * size for n in (cfg.n_heads, groups))
    sums = seq_len * cfg.n_heads * 4
    # One product of a query with every key it sees, one number wide.
    needed = 2 * cfg.n_heads * pairs_seen(cfg, seq_len)
    fetched = cut.keys * (wide_k + wide_v) * size
    tiles = groups * key_tiles(cfg, seq_len, cut.forward, cut.keys)
    yield Work(
        kernel="window forward",
        backward=False,
        flops=2 * tiles * cut.forward.rows * cut.keys * (wide_k + wide_v),
        needed=needed * (cfg.d_k + cfg.d_v),
        least=queries + keys + sums,
        most=queries + sums + tiles * fetched,
    )
    tiles = groups * key_tiles(cfg, seq_len, cut.query_gradient, cut.keys)
    yield Work(
        kernel="window dq",
        backward=True,
        flops=2 * tiles * cut.query_gradient.rows * cut.keys * (2 * wide_k + wide_v),
        # Scores are needed once: the gradient of the keys makes them again.
        needed=needed * (2 * cfg.d_k + cfg.d_v),
        least=2 * queries + keys + 2 * sums,
        most=2 * queries + 2 * sums + tiles * fetched,
    )
    tiles = groups * row_tiles(cfg, seq_len, cut.key_gradient, cut.keys)
    rows = tiles * cut.key_gradient.rows
    # Parts are written, and read again.
    numbers = seq_len * groups * (cfg.d_k + cfg.d_v)
    parts = 2 * cut.pieces * numbers * _WIDE if cut.pieces > 1 else 0
    yield Work(
        kernel="window dk, dv",
        backward=True,
        flops=2 * rows * cut.keys * 2 * (wide_k + wide_v),
        needed=needed * (cfg.d_k + cfg.d_v),
        least=queries + 2 * keys + 2 * sums + parts,
        most=2 * keys + parts + rows * ((wide_k + wide_v) * size + 8),
    )


def key_tiles(cfg: NSAConfig, seq_len: int, tile: Tile, keys: int) -> int:
    """Tiles of `keys` keys that all tiles of queries of one kv group walk over."""
    heads, total = cfg.heads_per_group, 0
    for first_row in range(0, seq_len * heads, tile.rows):
        first = first_row // heads
        last = min((first_row + tile.rows - 1) // heads, seq_len - 1)
        total += -(-(last + 1 - max(0, first - cfg.w + 1)) // keys)
    return total


def row_tiles(cfg: NSAConfig, seq_len: int, tile: Tile, keys: int) -> int:
    """Tiles of rows that all tiles of `keys` keys of one kv group walk over."""
    total = 0
    for first in range(0, seq_len, keys):
        last = min(first + keys, seq_len) - 1
        rows = (min(last + cfg.w, seq_len) - first) * cfg.heads_per_group
        total += -(-rows // tile.rows)
    return total


def pairs_seen(cfg: NSAConfig, seq_len: int) -> int:
    """Keys that the tokens see, one by one."""
    inside = min(cfg.w, seq_len)
    return inside * (inside + 1) // 2 + (seq_len - inside) * cfg.w
