"""The space of shapes that the independent reference is compared on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from nsa import NSAConfig
from nsa.config import Phi
from tests.attention.equations import Array

NAMES = ("q", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win", "gates")


@dataclass(frozen=True, kw_only=True)
class Example:
    """One point: a config, a batch, a length, and the seed of its numbers."""

    config: NSAConfig
    batch: int
    seq_len: int
    seed: int

    def numbers(self) -> dict[str, Array]:
        """Random inputs; scores get a spread of about 1.5, so that softmax is far from uniform."""
        s, rng = self.config, np.random.default_rng(self.seed)
        rows = max(0, (self.seq_len - s.l) // s.d + 1) if s.phi == "mlp" else self.seq_len
        heads = self.batch, self.seq_len, s.n_heads
        x: dict[str, Array] = {"q": 1.5 * rng.standard_normal((*heads, s.d_k))}
        for branch, length in (("cmp", rows), ("sel", self.seq_len), ("win", self.seq_len)):
            x[f"k_{branch}"] = rng.standard_normal((self.batch, length, s.n_kv_groups, s.d_k))
            x[f"v_{branch}"] = rng.standard_normal((self.batch, length, s.n_kv_groups, s.d_v))
        x["gates"] = rng.uniform(size=(*heads, 3))
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
    d, groups = draw(st.sampled_from((1, 2, 3, 4, 8, 16))), draw(st.sampled_from((1, 2, 3)))
    config = NSAConfig(
        dim=8, n_heads=groups * draw(st.sampled_from((1, 2, 6, 16))), n_kv_groups=groups,
        d_k=draw(st.sampled_from((1, 3, 8))), d_v=draw(st.sampled_from((1, 4, 5))),
        l=d * draw(st.sampled_from((1, 2, 3))), d=d, l_sel=d * draw(st.sampled_from((1, 2, 4))),
        n_sel=draw(st.sampled_from((3, 4, 7, 40))), w=draw(st.sampled_from((1, 2, 17, 64, 400))),
        phi=draw(st.sampled_from(get_args(Phi))),
    )  # fmt: skip
    return Example(
        config=config, batch=draw(st.integers(1, 2)), seq_len=draw(st.integers(1, longest)),
        seed=draw(st.integers(0, 2**16)),
    )  # fmt: skip
