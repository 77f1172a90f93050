"""Proofs of the window's Triton kernels in the interpreter: what is wrong, by proof, as JSON.

The truth is NumPy's, in float64, one position at a time: outputs by the independent reference's own
`attention`, gradients by the chain rule written out beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

import nsa
from nsa.attention.triton.tiles import Tile, WindowCut, choose_window_cut
from tests.attention.defects import defects
from tests.attention.equations import attention, softmax
from tests.attention.triton_kernels import (
    BOUND,
    LAUNCH,
    SHAPES,
    alone,
    compare,
    config_of,
    cut_as,
    far_apart,
    inputs,
    judged,
    over_drawn,
    poisoned,
    written_once,
)

HALF = torch.float16


@dataclass(frozen=True, kw_only=True)
class Case:
    """A shape, and how its work is cut; cut None: as a device would.

    cut: rows and keys of a tile; pieces: programs that share the walk of a tile of keys.
    """

    seq_len: int
    w: int
    heads: int = 1
    groups: int = 1
    batch: int = 1
    d_k: int = 16
    d_v: int = 16
    dtype: torch.dtype = torch.float32
    cut: tuple[int, int] | None = (16, 16)
    pieces: int = 1

    def config(self) -> nsa.NSAConfig:
        """The package's config for it; no compression block is complete."""
        return config_of(self, w=self.w, l=self.seq_len + 1, d=1, l_sel=64)


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
    """Everything in float64; lse to the base 2 [B,G,S,h]."""
    q, k, v, grad = (x.double().numpy() for x in inputs(case))
    truth = {"out": np.zeros_like(grad), "lse": np.zeros(grad.swapaxes(1, 2).shape[:4])}
    truth |= {"dq": np.zeros_like(q), "dk": np.zeros_like(k), "dv": np.zeros_like(v)}
    for b, t, g in np.ndindex(*q.shape[:3]):
        seen = [i for i in range(t + 1) if t - i < case.w]
        keys, values, d = k[b, seen, g], v[b, seen, g], grad[b, t, g]
        p, out = attention(q[b, t, g], keys, values)
        truth["out"][b, t, g] = out
        scores = q[b, t, g] @ keys.T / np.sqrt(case.d_k)
        assert np.allclose(p, softmax(scores))
        truth["lse"][b, g, t] = np.log2(np.exp(scores).sum(-1))
        # softmax's Jacobian is diag(p) - p p^T.
        ds = p * (d @ values.T - (d * out).sum(-1, keepdims=True)) / np.sqrt(case.d_k)
        truth["dq"][b, t, g] = ds @ keys
        truth["dk"][b, seen, g] += ds.T @ q[b, t, g]
        truth["dv"][b, seen, g] += p.T @ d
    return {name: torch.from_numpy(x) for name, x in truth.items()}


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
    problems: list[str] = []
    for case in cases:
        tensors = inputs(case)
        with written_once(problems), poisoned():
            mine = found_by(launch, case, tensors)
        for name, truth in right(case).items():
            # A softmax over one key has no gradient: nothing is then held against one.
            base = 1.0 if truth.abs().max() < 1e-12 else 0.0
            got, bound = mine[name].double() + base, BOUND[case.dtype]
            problems += compare(f"{name} of {case}", got, truth + base, bound)
        if problems:
            break
    return problems


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
    given_ = inputs(case)
    with far_apart(given_[:3], [1 << 27] * 3) as far:
        mine = found_by(launch, case, [*far, given_[3]])
    near = found_by(LAUNCH, case, given_)
    return [f"{name} differs" for name in near if not torch.equal(near[name], mine[name])]


_ALL: tuple[Callable[..., list[str]], ...] = (
    core, window_tuned, window_space, window_far,
)  # fmt: skip
PROOFS: dict[str, Any] = {one.__name__: one for one in _ALL} | {
    name: partial(judged, judge, kind, name)
    for kind, judge in (("window", core), ("window_in_32_bits", window_far))
    for name in defects(kind)
}
