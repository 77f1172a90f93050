"""The Triton kernels of the window, without a GPU: their work, and compiled."""

from __future__ import annotations

from dataclasses import replace

import pytest

import nsa
from nsa.attention.triton import tiles
from nsa.attention.triton.tiles import register_limit
from tests.attention.triton_process import needs_triton

CFG = nsa.NSAConfig()


@needs_triton
@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
def test_what_the_assembler_makes_of_them() -> None:
    """The window on Blackwell, whose forward spills without a limit of its own.

    On what is older it is compiled with the other parts of a training step.
    """
    from benchmarks.triton_aot.compiled import compile_kernel
    from benchmarks.triton_aot.kernels import core, window

    (forward, *_), (keys,) = core(CFG, 2048, 4), window(CFG, 2048, 4)
    assert compile_kernel(forward, 100, "bf16").problems == []
    greedy = compile_kernel(replace(keys, warps=1), 80, "bf16")
    assert any("are spilled" in text for text in greedy.problems), greedy


@pytest.mark.parametrize(
    ("seq_len", "pairs", "pieces"),
    # 32 tiles of keys, each seen by 575 tokens of 6 heads: 53 tiles of rows, 13 pieces at most.
    [(2048, 2, 4), (2048, 3, 3), (2048, 8, 1), (512, 1, 12), (1024, 1, 13), (40, 2, 1),
     (8192, 2, 1), (8128, 2, 2)],
)  # fmt: skip
def test_pieces_of_walks_by_hand(seq_len: int, pairs: int, pieces: int) -> None:
    """As many as give a device 256 programs, of four tiles each at least; S cuts walks short."""
    assert tiles.choose_window_cut(CFG, seq_len, pairs).pieces == pieces


def test_blackwell_is_given_all_registers() -> None:
    assert [register_limit(major) for major in (8, 9, 10, 12)] == [None, None, 255, 255]
