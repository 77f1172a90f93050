"""What `triton_tune` tries: parts of how the Triton kernels are cut, and values for each."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from nsa.attention.triton.compressed import launch as compressed_launch
from nsa.attention.triton.selected import launch
from nsa.attention.triton.tiles import Tile
from nsa.attention.triton.window import launch as window_launch


@dataclass(frozen=True, kw_only=True)
class Knob:
    """A field of a cut ("by_block.forward": of a part of it), and the kernels that it decides."""

    field: str
    kernels: tuple[str, ...]
    values: tuple[Any, ...]


def tiles(rows: Sequence[int], warps: Sequence[int], stages: Sequence[int]) -> tuple[Tile, ...]:
    """All of them."""
    every = itertools.product(rows, warps, stages)
    return tuple(Tile(rows=r, warps=w, stages=s) for r, w, s in every)


# The module whose cut it is, the function that makes it, and what is tried.
KNOBS: tuple[tuple[str, ModuleType, str, tuple[Knob, ...]], ...] = (
    (
        "selected",
        launch,
        "choose_cut",
        (
            Knob(
                field="forward",
                kernels=("forward_kernel",),
                values=tiles((32, 64, 128), (4, 8), (1, 2, 3)),
            ),
            Knob(
                field="query_gradient",
                kernels=("query_gradient_kernel",),
                values=tiles((32, 64, 128), (4, 8), (1, 2, 3)),
            ),
            Knob(
                field="key_gradient",
                kernels=("piece_kernel", "sum_kernel"),
                values=tiles((16, 32, 64, 128), (4, 8), (1, 2, 3)),
            ),
            Knob(
                field="by_block.forward",
                kernels=("part_kernel",),
                values=tiles((32, 64, 128), (4, 8), (1, 2, 3)),
            ),
            Knob(
                field="by_block.query_gradient",
                kernels=("gradient_part_kernel",),
                values=tiles((32, 64, 128), (4, 8), (1, 2, 3)),
            ),
            Knob(
                field="by_block.piece",
                kernels=("part_kernel", "gradient_part_kernel"),
                values=(64, 128, 256, 512),
            ),
        ),
    ),
    (
        "compressed",
        compressed_launch,
        "choose_compressed_cut",
        (
            Knob(
                field="forward",
                kernels=("compressed_kernel",),
                values=tiles((64, 128), (4, 8), (1, 2, 3)),
            ),
            Knob(field="keys", kernels=("compressed_kernel",), values=(16, 32, 64, 128)),
            Knob(
                field="query_gradient",
                kernels=("compressed_query_gradient_kernel",),
                values=tiles((64, 128), (4, 8), (1, 2, 3)),
            ),
            Knob(
                field="rounded_keys",
                kernels=("compressed_query_gradient_kernel",),
                values=(32, 64, 128),
            ),
            Knob(
                field="key_gradient",
                kernels=("compressed_piece_kernel", "compressed_sum_kernel"),
                values=tiles((32, 64, 128), (4, 8), (1, 2, 3)),
            ),
            Knob(
                field="owned",
                kernels=("compressed_piece_kernel", "compressed_sum_kernel"),
                values=(32, 64, 128),
            ),
            Knob(
                field="piece",
                kernels=("compressed_piece_kernel", "compressed_sum_kernel"),
                values=(64, 256, 512, 1024, 2048, 4096),
            ),
        ),
    ),
    (
        "top",
        compressed_launch,
        "choose_compressed_cut",
        (
            Knob(
                field="top",
                kernels=("top_kernel",),
                values=tiles((16, 32, 64, 128), (4, 8), (1, 2, 3)),
            ),
            Knob(field="blocks", kernels=("top_kernel",), values=(8, 16, 32, 64)),
        ),
    ),
    (
        "window",
        window_launch,
        "choose_window_cut",
        (
            Knob(
                field="forward",
                kernels=("window_kernel",),
                values=tiles((64, 128), (4, 8), (2, 3)),
            ),
            Knob(
                field="query_gradient",
                kernels=("window_query_kernel",),
                values=tiles((64, 128), (4, 8), (1, 2, 3)),
            ),
            Knob(
                field="key_gradient",
                kernels=("window_keys_kernel", "window_sum_kernel"),
                values=tiles((32, 64, 128), (4, 8), (1, 2, 3)),
            ),
            Knob(
                field="pieces",
                kernels=("window_keys_kernel", "window_sum_kernel"),
                values=(1, 2, 4, 8),
            ),
        ),
    ),
)
