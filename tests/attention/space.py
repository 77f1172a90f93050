"""The space of shapes that the independent reference is compared on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from nsa import NSAConfig
from tests.attention.equations import Array, Shape

NAMES = ("q", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win", "gates")


@dataclass(frozen=True, kw_only=True)
class Example:
    """One point: a shape, a batch, a length, what phi is, and the seed of its numbers."""

    shape: Shape
    batch: int
    seq_len: int
    compressed: bool
    seed: int

    def config(self) -> NSAConfig:
        """The package's config for it."""
        s = self.shape
        return NSAConfig(
            dim=8,
            n_heads=s.groups * s.heads,
            n_kv_groups=s.groups,
            d_k=s.d_k,
            d_v=s.d_v,
            l=s.l,
            d=s.d,
            l_sel=s.lp,
            n_sel=s.n,
            w=s.w,
            phi="mlp" if self.compressed else "avg",
        )

    def numbers(self) -> dict[str, Array]:
        """Random inputs; scores get a spread of about 1.5, so that softmax is far from uniform."""
        s, rng = self.shape, np.random.default_rng(self.seed)
        rows = max(0, (self.seq_len - s.l) // s.d + 1) if self.compressed else self.seq_len
        x: dict[str, Array] = {
            "q": 1.5 * rng.standard_normal((self.batch, self.seq_len, s.groups * s.heads, s.d_k))
        }
        for branch, length in (("cmp", rows), ("sel", self.seq_len), ("win", self.seq_len)):
            x[f"k_{branch}"] = rng.standard_normal((self.batch, length, s.groups, s.d_k))
            x[f"v_{branch}"] = rng.standard_normal((self.batch, length, s.groups, s.d_v))
        x["gates"] = rng.uniform(size=(self.batch, self.seq_len, s.groups * s.heads, 3))
        return x


def tensors(x: dict[str, Array], dtype: torch.dtype) -> dict[str, Tensor]:
    """The same numbers as leaf tensors."""
    return {n: torch.tensor(v, dtype=dtype).requires_grad_() for n, v in x.items()}


def rounded(x: dict[str, Array], dtype: torch.dtype) -> dict[str, Array]:
    """The numbers that a type can hold, in float64."""
    return {n: torch.tensor(v, dtype=dtype).double().numpy() for n, v in x.items()}


@st.composite
def examples(draw: st.DrawFn, *, longest: int = 300) -> Example:
    """Any allowed combination, small or large, multiples of nothing."""
    d = draw(st.sampled_from((1, 2, 3, 4, 8, 16)))
    shape = Shape(
        groups=draw(st.sampled_from((1, 2, 3))),
        heads=draw(st.sampled_from((1, 2, 6, 16))),
        d_k=draw(st.sampled_from((1, 3, 8))),
        d_v=draw(st.sampled_from((1, 4, 5))),
        l=d * draw(st.sampled_from((1, 2, 3))),
        d=d,
        lp=d * draw(st.sampled_from((1, 2, 4))),
        n=draw(st.sampled_from((3, 4, 7, 40))),
        w=draw(st.sampled_from((1, 2, 17, 64, 400))),
    )
    return Example(
        shape=shape,
        batch=draw(st.integers(1, 2)),
        seq_len=draw(st.integers(1, longest)),
        compressed=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )
