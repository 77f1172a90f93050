"""A second reference, in NumPy, one position at a time, from the paper's equations.

It shares no line with the package, nor with the shipped tests' oracle: that one works out equation
9 from the tokens two blocks share, this one from the equation's printed double sum, made 0-based.
float64 throughout. Gradients are checked against finite differences of this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from nsa import NSAConfig
from nsa.config import Phi

Array = NDArray[np.float64]


def softmax(x: Array) -> Array:
    """Along the last axis."""
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def attention(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """Equation 1 for heads q [h,dk] on keys k [m,dk], values v [m,dv]: (probabilities, out)."""
    if len(k) == 0:
        return np.zeros((len(q), 0)), np.zeros((len(q), v.shape[1]))
    p = softmax(q @ k.T / np.sqrt(q.shape[1]))
    return p, p @ v


def compress(x: Array, s: NSAConfig) -> Array:
    """Equation 7 with phi the mean: the blocks of x [S,D] that end within it."""
    blocks = []
    i = 0
    while i * s.d + s.l <= len(x):
        blocks.append(x[i * s.d : i * s.d + s.l].mean(0))
        i += 1
    return np.array(blocks).reshape(len(blocks), x.shape[1])


def block_importance(p: Array, j: int, s: NSAConfig) -> float:
    """Equation 9: selection block j gathers p[(l'/d) j + m - n] over m < l'/d and n < l/d."""
    total = 0.0
    for m in range(s.l_sel // s.d):
        for n in range(s.l // s.d):
            i = (s.l_sel // s.d) * j + m - n
            if 0 <= i < len(p):
                total += p[i]
    return total


def select(p: Array, t: int, s: NSAConfig) -> tuple[list[int], float]:
    """Equations 10 to 12 for probabilities p [h,N]: the blocks, and the margin of the choice.

    The margin is the gap between the last block taken and the first one left out by score: where
    it is tiny but not 0, rounding may choose the other one. Exact ties go to the lower index.
    """
    group = p.sum(0)
    last = t // s.l_sel
    taken = {0, last}
    if last > 0:
        taken.add(last - 1)
    open_ = [(block_importance(group, j, s), j) for j in range(last + 1) if j not in taken]
    open_.sort(key=lambda pair: (-pair[0], pair[1]))
    room = s.n_sel - len(taken)
    margin = np.inf
    if 0 < room < len(open_):
        margin = open_[room - 1][0] - open_[room][0] or np.inf
    return sorted(taken | {j for _, j in open_[: max(0, room)]}), float(margin)


@dataclass(frozen=True, kw_only=True)
class Result:
    """out [B,S,H,Dv], blocks [B][S][G] lists, and the smallest margin of any choice."""

    out: Array
    blocks: list[list[list[list[int]]]]
    margin: float


def nsa(x: dict[str, Array], s: NSAConfig, *, fixed: Result | None = None) -> Result:
    """Equation 5. With phi "mlp" k_cmp, v_cmp are already compressed [B,N,G,D].

    fixed: take the blocks from an earlier result (for finite differences across a choice).
    """
    batch, length = x["q"].shape[:2]
    groups = range(s.n_kv_groups)
    out = np.zeros((batch, length, s.n_kv_groups * s.heads_per_group, s.d_v))
    blocks: list[list[list[list[int]]]] = []
    margin = np.inf
    for b in range(batch):
        blocks.append([])
        # A block is the same for every query that sees it: the mean is taken once.
        k_cmp, v_cmp = (
            [compress(x[name][b, :, g], s) if s.phi == "avg" else x[name][b, :, g] for g in groups]
            for name in ("k_cmp", "v_cmp")
        )
        for t in range(length):
            blocks[b].append([])
            for g in groups:
                mine = range(g * s.heads_per_group, (g + 1) * s.heads_per_group)
                q, gate = x["q"][b, t, mine], x["gates"][b, t, mine]
                ended = sum(1 for i in range(len(k_cmp[g])) if i * s.d + s.l - 1 <= t)
                p, o = attention(q, k_cmp[g][:ended], v_cmp[g][:ended])
                total = gate[:, [0]] * o
                chosen, gap = select(p, t, s)
                if fixed is not None:
                    chosen = fixed.blocks[b][t][g]
                margin = min(margin, gap)
                blocks[b][t].append(chosen)
                tokens = [i for i in range(t + 1) if i // s.l_sel in chosen]
                total += (
                    gate[:, [1]]
                    * attention(q, x["k_sel"][b, tokens, g], x["v_sel"][b, tokens, g])[1]
                )
                near = [i for i in range(t + 1) if t - i < s.w]
                total += (
                    gate[:, [2]] * attention(q, x["k_win"][b, near, g], x["v_win"][b, near, g])[1]
                )
                out[b, t, mine] = total
    return Result(out=out, blocks=blocks, margin=margin)


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
