"""The selected branch: lists of blocks, forward, gradients of queries and of keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.grids import Kernel, Work
from nsa.attention.triton.selected.tiles import (
    ByBlock,
    Cut,
    choose_cut,
    cut_by_block,
    expected_union,
)
from nsa.attention.triton.tiles import LEAST, Tile, padded
from nsa.config import NSAConfig

_POINTERS = {
    "blocks": "i64", "ranges": "i64", "bits": "i32", "lse": "fp32", "delta": "fp32",
    "parts": "fp32", "counts": "i32", "offsets": "i32", "readers": "i32", "piece_ends": "i32",
    "before": "i8", "read": "i32", "sums": "fp32",
}  # fmt: skip
# Where blocks own the work, parts are of the call's type.
_BY_BLOCK = {name: kind for name, kind in _POINTERS.items() if name != "parts"}


def kernels(cfg: NSAConfig, seq_len: int, pairs: int) -> Iterator[Kernel]:
    """Every kernel, as a call of this shape would launch it."""
    from nsa.attention.triton import rows
    from nsa.attention.triton.selected import columns, index, launch, lists, ranges

    cut, shape = choose_cut(cfg, seq_len, pairs), launch.shape_constants(cfg)
    walk = {"EVERY": cut.every}
    l_sel, by_block = {"L_SEL": cfg.l_sel}, cut.by_block
    places = by_block.places if by_block else 1
    chosen = {**l_sel, "N_SEL": cfg.n_sel, "PLACES": 1 << (cfg.n_sel - 1).bit_length()}
    for name, function, of in (
        ("ranges", ranges.ranges_kernel, "ROWS"), ("pack", index.pack_kernel, "TOKENS"),
    ):  # fmt: skip
        yield Kernel(
            name=name, function=function, warps=4, stages=1, dots=False, pointers=_POINTERS,
            constants={**chosen, of: launch.TOKENS},
        )  # fmt: skip
    for fill in (False, True):
        yield Kernel(
            name=f"list{' (fill)' * fill}", function=index.list_kernel, warps=4, stages=3,
            dots=False, pointers=_POINTERS,
            constants={**l_sel, "TOKENS": lists.TOKENS_OF_A_LIST, "FILL": fill, "PLACES": places},
        )  # fmt: skip
    yield Kernel(
        name="offsets", function=index.offset_kernel, warps=4, stages=3, dots=False,
        pointers=_POINTERS,
        constants={"PIECE": cut.piece, "PIECE_OF_RUN": by_block.piece if by_block else cut.piece,
                   "BLOCKS": lists.BLOCKS_AT_ONCE},
    )  # fmt: skip
    # Other shapes walk where this one does not.
    tiles: tuple[tuple[str, Any, Tile, dict[str, int]], ...] = (
        ("forward", rows.forward_kernel, cut.forward, walk),
        ("dq", rows.query_gradient_kernel, cut.query_gradient, walk),
        ("dk, dv", columns.piece_kernel, cut.key_gradient,
         launch.piece_constants(cfg, seq_len, cut)),
    )  # fmt: skip
    for name, function, tile, more in tiles:
        yield Kernel(
            name=f"{name}, {tile.rows} rows{', every block' * bool(more.get('EVERY'))}",
            function=function, warps=tile.warps, stages=tile.stages, pointers=_POINTERS,
            constants={**shape, **more, "ROWS": tile.rows},
        )  # fmt: skip
    rest = {name: value for name, value in shape.items() if name != "HEADS"} | {"FEW": LEAST}
    yield Kernel(name="sum", function=columns.sum_kernel, constants=rest, warps=4, stages=3,
                 dots=False, pointers=_POINTERS)  # fmt: skip
    if by_block:
        yield from _by_block_kernels(cfg, seq_len, by_block)


def _by_block_kernels(cfg: NSAConfig, seq_len: int, cut: ByBlock) -> Iterator[Kernel]:
    """Instead of the two that walk."""
    from nsa.attention.triton.selected import blocks, index, launch, lists

    shape, places = launch.shape_constants(cfg), {"PLACES": cut.places}
    yield Kernel(
        name="places", function=index.place_kernel, warps=4, stages=3, dots=False,
        pointers=_BY_BLOCK, constants={"TOKENS": lists.TOKENS_OF_PLACES},
    )  # fmt: skip
    piece = launch.by_block_constants(cfg, seq_len, cut)
    output = ("HEADS", "D_V", "WIDTH_V")
    gradient = ("HEADS", "D_K", "WIDTH_K")
    tiles: tuple[tuple[str, Any, Tile, dict[str, int]], ...] = (
        ("forward by block", blocks.part_kernel, cut.forward, {**shape, **piece}),
        ("merge", blocks.merge_kernel, cut.merge, {n: shape[n] for n in output} | places),
        ("delta", blocks.delta_kernel, cut.merge, {n: shape[n] for n in (*output, *gradient[1:])}),
        ("dq by block", blocks.gradient_part_kernel, cut.query_gradient, {**shape, **piece}),
        ("dq merge", blocks.gradient_merge_kernel, cut.merge,
         {n: shape[n] for n in gradient} | places),
    )  # fmt: skip
    for name, function, tile, constants in tiles:
        yield Kernel(
            name=f"{name}, {tile.rows} rows", function=function, warps=tile.warps,
            stages=tile.stages, dots="by block" in name, pointers=_BY_BLOCK, own=("parts",),
            constants={**constants, "ROWS": tile.rows},
        )  # fmt: skip


def work(cfg: NSAConfig, seq_len: int, size: int = 2) -> Iterator[Work]:
    """Tokens are taken to draw their blocks independently, as the cost model has it."""
    cut = choose_cut(cfg, seq_len, cfg.n_kv_groups)
    width = padded(cfg.d_k) + padded(cfg.d_v)
    block = padded(cfg.l_sel)
    queries, keys, bits, sums = _moved(cfg, seq_len, size)
    if cut.by_block:
        yield from _by_block(cfg, seq_len, cut.by_block, size)
    else:
        yield from _walks(cfg, seq_len, cut, size)
    read = cfg.n_kv_groups * _read(cfg, seq_len)
    parts = cfg.n_kv_groups * min(cut.n_pieces, cfg.n_blocks(seq_len) + read / cut.piece) * block
    # The lists: where dq did not make them, bits are read twice and numbers of tokens written.
    listed = read * 4 + (0 if cut.by_block else 2 * bits + read * 4)
    rest = parts * width * 4 * 2 + listed + 2 * sums
    gathered = read * cfg.heads_per_group
    yield Work(
        kernel="dk, dv",
        backward=True,
        flops=2 * gathered * block * 2 * width,
        needed=_needed(cfg, seq_len) * (cfg.d_k + cfg.d_v),
        least=queries + 2 * keys + rest,
        most=2 * keys + rest + gathered * (width * size + 8),
    )


def forms(cfg: NSAConfig, seq_len: int, size: int = 2) -> tuple[Iterator[Work], Iterator[Work]]:
    """Forward pass and dq if queries walked, and if blocks owned the work."""
    cut = choose_cut(cfg, seq_len, cfg.n_kv_groups)
    by_block = _by_block(cfg, seq_len, cut_by_block(cfg, seq_len), size)
    return _walks(cfg, seq_len, cut, size), by_block


def _walks(cfg: NSAConfig, seq_len: int, cut: Cut, size: int) -> Iterator[Work]:
    """Queries walk over the blocks that their tile reads."""
    width, block = padded(cfg.d_k) + padded(cfg.d_v), padded(cfg.l_sel)
    queries, keys, bits, sums = _moved(cfg, seq_len, size)
    walked, walked_dq = (_walked(cfg, seq_len, t, cut) for t in (cut.forward, cut.query_gradient))
    yield Work(
        kernel="forward",
        backward=False,
        flops=walked * cut.forward.rows * block * width * 2,
        needed=_needed(cfg, seq_len) * (cfg.d_k + cfg.d_v),
        least=queries + keys + bits + sums,
        most=queries + bits + sums + walked * block * width * size,
    )
    of_dq = walked_dq * cut.query_gradient.rows * block * (2 * padded(cfg.d_k) + padded(cfg.d_v))
    yield Work(
        kernel="dq",
        backward=True,
        flops=2 * of_dq,
        # Scores are needed once: the gradient of the keys makes them again.
        needed=_needed(cfg, seq_len) * (2 * cfg.d_k + cfg.d_v),
        least=2 * queries + keys + bits + 2 * sums,
        most=2 * queries + bits + 2 * sums + walked_dq * block * width * size,
    )


def _by_block(cfg: NSAConfig, seq_len: int, cut: ByBlock, size: int) -> Iterator[Work]:
    """Blocks own the work: parts by one kernel, put together by another.

    A list's last tile and the last of each piece are half empty, as lengths fall.
    """
    wide_k, wide_v, block = padded(cfg.d_k), padded(cfg.d_v), padded(cfg.l_sel)
    _, keys, bits, sums = _moved(cfg, seq_len, size)
    gathered = cfg.n_kv_groups * _read(cfg, seq_len) * cfg.heads_per_group
    pieces = 0.0
    for begin in range(0, seq_len, cut.tokens):
        end = min(begin + cut.tokens, seq_len)
        read = _read(cfg, end) - _read(cfg, begin)
        pieces += cfg.n_kv_groups * (cfg.n_blocks(end) + read / cut.piece)
    # Bits are read three times, places (a byte for a word of them) written and read, like lists.
    lists = bits * 3.5 + gathered / cfg.heads_per_group * 4 * 2
    for backward, own in ((False, cut.forward), (True, cut.query_gradient)):
        rows = gathered + pieces * own.rows / 2
        numbers = cfg.d_k if backward else cfg.d_v
        parts = gathered * (numbers * size + (0 if backward else 4))
        # Scores are needed once: the gradient of the keys makes them again.
        products = (2 if backward else 1) * wide_k + wide_v
        needed = (2 if backward else 1) * cfg.d_k + cfg.d_v
        of_rows = cfg.d_k + cfg.d_v if backward else cfg.d_k
        given = seq_len * cfg.n_heads * of_rows * size + 2 * sums * backward
        yield Work(
            kernel="dq by block" if backward else "forward by block",
            backward=backward,
            flops=2 * rows * block * products,
            needed=_needed(cfg, seq_len) * needed,
            least=lists + given + keys + parts,
            most=lists + gathered * (of_rows * size + 8 * backward) + parts
            + pieces * block * (wide_k + wide_v) * size,
        )  # fmt: skip
        # Besides, delta reads output and gradient, and writes a number for each row.
        result = seq_len * cfg.n_heads * numbers * size + sums
        extra = 2 * seq_len * cfg.n_heads * cfg.d_v * size if backward else 0
        yield Work(
            kernel="delta, dq merge" if backward else "merge",
            backward=backward,
            flops=0,
            needed=0,
            least=parts + result + extra,
            most=parts + result + extra,
        )


def _moved(cfg: NSAConfig, seq_len: int, size: int) -> tuple[int, int, int, int]:
    """Bytes of queries and output, of keys and values, of bits, and of a number for each row."""
    queries, keys = (
        seq_len * n * (cfg.d_k + cfg.d_v) * size for n in (cfg.n_heads, cfg.n_kv_groups)
    )
    bits = cfg.n_kv_groups * -(-cfg.n_blocks(seq_len) // 32) * seq_len * 4
    return queries, keys, bits, seq_len * cfg.n_heads * 4


def _needed(cfg: NSAConfig, seq_len: int) -> int:
    """One product of a query with what it reads, or of probabilities with it, one number wide."""
    return 2 * cfg.n_heads * _tokens_read(cfg, seq_len)


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
