"""Proofs of the window's Triton kernels in the interpreter: what is wrong, by proof, as JSON.

The truth is torch's in float64, with the mask written out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType

import torch
from hypothesis import strategies as st
from torch import Tensor

from nsa.attention.triton.tiles import Tile, WindowCut, choose_window_cut
from tests.attention.triton_kernels import (
    LAUNCH,
    SHAPES,
    Shape,
    alone,
    branch,
    cut_as,
    far_problems,
    held,
    inputs,
    over_drawn,
    proofs_of,
    with_gradients,
)

HALF = torch.float16


@dataclass(frozen=True, kw_only=True)
class Case(Shape):
    """A shape, and how its work is cut; cut None: as a device would.

    cut: rows and keys of a tile; pieces: programs that share the walk of a tile of keys.
    """

    w: int
    cut: tuple[int, int] | None = (16, 16)
    pieces: int = 1
    # No compression block is complete.
    l = property(lambda self: self.seq_len + 1)  # noqa: E741
    d, l_sel = 1, 64


# Between them: walks with whole tiles and without, tiles of less than a token, of one and of many,
# heads that fill no tile, windows of one token, shorter and longer than a tile and than S, rows
# that see nothing of their tile's first keys; walks in pieces, fewer and more than their tiles.
CORE = (
    Case(seq_len=37, w=20, heads=3, groups=2, d_k=24, d_v=8, cut=(32, 16)),
    Case(seq_len=70, w=45, batch=2, d_k=3, d_v=5, pieces=4),
    Case(seq_len=50, w=1, cut=(64, 16)),
    Case(seq_len=19, w=64, heads=16, pieces=7),
    Case(seq_len=5, w=3, heads=2, cut=(64, 32)),
)


@cache
def right(case: Case) -> dict[str, Tensor]:
    """Everything in float64."""
    token = torch.arange(case.seq_len)
    seen = (token <= token[:, None]) & (token > token[:, None] - case.w)
    return with_gradients(case, inputs(case), partial(branch, seen=seen[:, None]))


def found_by(launch: ModuleType, case: Case, tensors: list[Tensor]) -> dict[str, Tensor]:
    """The same by the kernels."""
    cfg = case.config()
    cut = choose_window_cut(cfg, case.seq_len, case.batch * case.groups)
    if case.cut is not None:
        tile = Tile(rows=case.cut[0], warps=1, stages=1)
        cut = WindowCut(
            forward=tile, query_gradient=tile, key_gradient=tile, keys=case.cut[1],
            pieces=case.pieces,
        )  # fmt: skip
    with cut_as(launch, window=cut):
        return alone(launch, 2, cfg, tensors)


def core(launch: ModuleType = LAUNCH, cases: tuple[Case, ...] = CORE) -> list[str]:
    """What the kernels of `launch` compute wrongly, write twice, or leave unwritten."""
    return held(launch, cases, found_by, right, of_one=True)


def window_tuned() -> list[str]:
    """As a device would cut it: the production's heads and widths in float16, 128 wide.

    And the widest window.
    """
    return core(LAUNCH, (
        Case(seq_len=150, w=80, heads=6, d_k=64, d_v=64, dtype=HALF, cut=None),
        Case(seq_len=70, w=200, heads=16, d_k=128, d_v=128, dtype=HALF, cut=None),
        Case(seq_len=200, w=100, d_k=128, d_v=64, cut=None),
        Case(seq_len=40, w=2**31 - 1, heads=2),
    ))  # fmt: skip


def window_space() -> list[str]:
    """Shapes drawn at random, gradients too."""
    cuts = st.sampled_from(((16, 16), (32, 16), (16, 32), (128, 64)))
    cases = st.builds(Case, **SHAPES, cut=cuts, pieces=st.integers(1, 3))
    return over_drawn(cases, lambda case: core(LAUNCH, (case,)), examples=6)


def window_far(launch: ModuleType = LAUNCH) -> list[str]:
    """Offsets beyond 32 bits: tokens that lie 2^27 numbers apart."""
    case = Case(seq_len=40, w=25, dtype=HALF)
    return far_problems(lambda of, x: found_by(of, case, x), launch, inputs(case), [1 << 27] * 3)


PROOFS = proofs_of(
    (core, window_tuned, window_space, window_far),
    {"window": core, "window_in_32_bits": window_far},
)
