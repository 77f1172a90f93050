"""Proofs of the compressed branch's kernels in Triton's interpreter, against float64 and NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import get_args

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from nsa.attention.triton.tiles import TERMS, CompressedCut, Tile
from nsa.config import Phi
from tests.attention import equations
from tests.attention.triton_kernels import (
    LAUNCH,
    Shape,
    alone,
    apart,
    branch,
    cut_as,
    far_problems,
    held,
    over_drawn,
    proofs_of,
    with_gradients,
)

HALF = torch.float16
# Where the last block taken and the first one left out are nearer, rounding may choose.
TIE = 1e-5


@dataclass(frozen=True, kw_only=True)
class Compressed(Shape):
    """A shape, and how its work is cut: of CompressedCut. sharp: how large keys are.

    phi: "mlp", of keys and values that are compressed already, or "avg".
    """

    l: int = 4  # noqa: E741 - the paper's letter
    d: int = 2
    l_sel: int = 4
    n_sel: int = 4
    phi: Phi = "mlp"
    rows: int = 32
    keys: int = 16
    owned: int = 16
    piece: int = 24
    tokens: int = 32
    blocks: int = 16
    sharp: float = 1.0
    w = 1

    def tensors(self) -> list[Tensor]:
        """q [B,S,G,h,Dk] and a gradient of a type, k, v [B,N,G,D] in float32; not contiguous.

        k, v of phi "avg": [B,S,G,D], of q's type.
        """
        draw = torch.Generator().manual_seed(self.seq_len)
        n, kind = self.seq_len, self.dtype
        if self.phi == "mlp":
            n, kind = self.config().n_compressed(self.seq_len), torch.float32
        of_tokens = self.batch, self.seq_len, self.groups, self.heads
        q = (1.5 * apart(*of_tokens, self.d_k, by=draw)).to(self.dtype)
        grad = apart(*of_tokens, self.d_v, by=draw).to(self.dtype)
        k, v = (
            apart(self.batch, n, self.groups, width, by=draw).to(kind)
            for width in (self.d_k, self.d_v)
        )
        return [q, self.sharp * k, v, grad]

    def cut(self) -> CompressedCut:
        """As asked, whatever a device would like."""
        tile = Tile(rows=self.rows, warps=1, stages=1)
        return CompressedCut(
            forward=tile, key_gradient=tile,
            top=Tile(rows=self.tokens, warps=1, stages=1),
            keys=self.keys, rounded_keys=self.keys, owned=self.owned, piece=self.piece,
            blocks=self.blocks,
        )  # fmt: skip


# Between them: no compressed key at all, heads that fill no tile, a tile of one token and of many,
# keys of several tiles and one alone in its tile, pieces that begin before a tile's first token,
# three strides in a compressed block, which reaches into one later block or two, more blocks than
# are scored at once, float16 whose keys are sums of two.
CORE = (
    Compressed(seq_len=7, heads=1, batch=2, l=8, d=4, l_sel=8, d_k=3, d_v=5, rows=16),
    Compressed(seq_len=60, heads=3, l=6, l_sel=8, dtype=torch.float16, rows=64, piece=32, blocks=4),
    Compressed(seq_len=38, heads=3, groups=2, l=6, l_sel=2, n_sel=5, d_k=24, d_v=8, rows=64),
)
# Pooled: blocks that overlap by none, one and two others, that end with a tile of tokens or not,
# tokens behind the last block and none, no block at all, widths that fill no power of two.
POOLED = (
    Compressed(seq_len=75, heads=1, groups=2, batch=2, phi="avg", l=32, d=16, l_sel=16, n_sel=3,
               d_k=24, d_v=5, piece=32),
    Compressed(seq_len=123, heads=2, phi="avg", l=45, d=15, l_sel=15, n_sel=3, d_k=7),
    Compressed(seq_len=66, heads=1, phi="avg", l=3, d=3, l_sel=6, d_k=32, dtype=torch.float16),
    Compressed(seq_len=19, heads=3, phi="avg", batch=2, l=20, d=5, l_sel=5, n_sel=3),
)  # fmt: skip


def pooled(x: Tensor, l: int, d: int) -> Tensor:  # noqa: E741
    """Means of the blocks of x [B,S,G,D] that end within it."""
    begins = range(0, x.shape[1] - l + 1, d)
    return torch.stack([x[:, i : i + l].mean(1) for i in begins], 1) if begins else x[:, :0]


def ended(n_blocks: int, seq_len: int, l: int, d: int) -> Tensor:  # noqa: E741
    """Which compressed blocks a token sees: [S,1,N]."""
    return (torch.arange(n_blocks) * d + l - 1 <= torch.arange(seq_len)[:, None])[:, None]


def right(case: Compressed) -> dict[str, Tensor]:
    """Everything in float64; lse: of keys rounded to the type, exact_lse: of those that choose."""
    own: list[Tensor] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if case.phi == "avg":
            k, v = (pooled(x, case.l, case.d) for x in (k, v))
        seen = ended(k.shape[1], case.seq_len, case.l, case.d)
        out, exact = branch(q, k, v, seen)
        own.append(exact)
        return out, branch(q, k.to(case.dtype).double(), v, seen)[1]

    truth = with_gradients(case, case.tensors(), attend)
    return {**truth, "exact_lse": own[0]}


def wrong_blocks(case: Compressed, blocks: Tensor, tensors: list[Tensor]) -> list[str]:
    """Tokens [B,S,G] whose blocks are not those of the equations; near ties aside."""
    q, k = (x.double() for x in tensors[:2])
    k = pooled(k, case.l, case.d) if case.phi == "avg" else k
    found, compared = [], 0
    for b, t, g in np.ndindex(case.batch, case.seq_len, case.groups):
        n_seen = int(ended(k.shape[1], case.seq_len, case.l, case.d)[t].sum())
        p, _ = equations.attention(
            q[b, t, g].numpy(), k[b, :n_seen, g].numpy(), np.zeros((n_seen, 1))
        )
        # What is alike but for rounding is a tie.
        taken, margin = equations.select(np.round(p, 12), t, case.config())
        wanted = taken + [-1] * (case.n_sel - len(taken))
        compared += margin >= TIE
        if margin >= TIE and blocks[b, t, g].tolist() != wanted:
            found.append(f"blocks of token {t}: {blocks[b, t, g].tolist()}, not {wanted}")
    few = compared < case.batch * case.seq_len * case.groups * 0.9
    return found[:3] + ["too many ties"] * few


def found_by(launch: ModuleType, case: Compressed, tensors: list[Tensor]) -> dict[str, Tensor]:
    """The same by the kernels, and the blocks."""
    cfg, cut = case.config(), case.cut()
    with cut_as(launch, compressed=cut, top=cut):
        found = alone(launch, 0, cfg, tensors)
        exact = found["exact_lse"].reshape(case.batch * case.groups, -1)
        blocks, _ = launch.compressed.top_blocks(tensors[0], found.pop("terms"), exact, cfg)
    return {**found, "blocks": blocks}


def core(launch: ModuleType = LAUNCH, cases: tuple[Compressed, ...] = CORE) -> list[str]:
    """What the kernels of `launch` compute wrongly, write twice, or leave unwritten."""
    problems: list[str] = []

    def found(launch: ModuleType, case: Compressed, tensors: list[Tensor]) -> dict[str, Tensor]:
        made = found_by(launch, case, tensors)
        problems.extend(wrong_blocks(case, made["blocks"], tensors))
        return made

    # One sum chooses blocks, the other is of keys as they were rounded.
    return held(launch, cases, found, right, exact=("lse", "exact_lse")) + problems


def pool_values() -> list[str]:
    """Keys and values that are pooled, gradients of their tokens too."""
    return core(cases=POOLED)


def compressed_tuned() -> list[str]:
    """The production's heads, widths, blocks in float16; sharp ones; 16 heads of 128, three terms.

    Three keys begin in each block of the sharp ones. A key of bf16 is a sum of three: the same
    code, here with numbers of float16.
    """
    production = Compressed(
        seq_len=230, heads=6, d_k=64, d_v=64, l=32, d=16, l_sel=64, n_sel=3, dtype=HALF, rows=128,
        keys=32, owned=64, piece=64, tokens=64, blocks=32,
    )  # fmt: skip
    wide = Compressed(seq_len=40, heads=16, d_k=128, d_v=128, dtype=HALF, rows=128)
    # Scores of 30 and more: rounded keys must not be held to the sum of the exact ones.
    sharp = Compressed(
        seq_len=60, heads=3, d_k=64, l_sel=6, sharp=6.0, dtype=HALF, rows=64, piece=32
    )
    problems = core(LAUNCH, (production, sharp))
    whole = dict(TERMS)
    TERMS["float16"] = 3
    try:
        return problems + core(LAUNCH, (wide,))
    finally:
        TERMS.update(whole)


@st.composite
def _cases(draw: st.DrawFn) -> Compressed:
    d = draw(st.sampled_from((1, 2, 3, 4)))
    return Compressed(
        seq_len=draw(st.integers(1, 48)), heads=draw(st.sampled_from((1, 2, 5, 16))),
        groups=draw(st.integers(1, 2)), batch=draw(st.integers(1, 2)),
        d_k=draw(st.sampled_from((1, 3, 8, 17))), d_v=draw(st.sampled_from((1, 5, 16))),
        phi=draw(st.sampled_from(get_args(Phi))),
        l=d * draw(st.integers(1, 3)), d=d, l_sel=d * draw(st.sampled_from((1, 2, 3, 4))),
        n_sel=draw(st.sampled_from((3, 4, 7, 16))), piece=draw(st.sampled_from((7, 32))),
        rows=draw(st.sampled_from((16, 64))), keys=draw(st.sampled_from((16, 32))),
        owned=draw(st.sampled_from((16, 32))),
        tokens=32, blocks=draw(st.sampled_from((16, 32))),
    )  # fmt: skip


def compressed_shapes() -> list[str]:
    """Any allowed shape, gradients and blocks too, against float64 and NumPy."""
    # Of one key alone the queries' gradient is 0, and an error is no share of that.
    cases = _cases().filter(lambda case: case.config().n_compressed(case.seq_len) != 1)
    return over_drawn(cases, lambda case: core(LAUNCH, (case,)), examples=6)


def ties(module: ModuleType = LAUNCH) -> list[str]:
    """Keys that are all the same: every block scores the same, and the first ones are taken.

    Two runs of blocks: those that the second one has to take in cost the last ones of the first.
    """
    case = Compressed(seq_len=64, heads=3, rows=64, tokens=64, blocks=8)
    q, k, *rest = case.tensors()
    same = [q, torch.ones_like(k), *rest]
    blocks = found_by(module, case, same)["blocks"]
    taken = {tuple(blocks[0, t, 0].tolist()) for t in range(60, 64)}
    problems = [] if taken == {(0, 1, 14, 15)} else [f"not the first ones: {taken}"]
    # And by the equations, which call exact ties no tie.
    return problems + wrong_blocks(case, blocks, same)


def compressed_far(module: ModuleType = LAUNCH) -> list[str]:
    """Offsets beyond 32 bits: queries 2^27 numbers apart, keys, half as many, 2^28."""
    return _far(
        module, Compressed(seq_len=40, heads=1, l_sel=2, n_sel=6, dtype=HALF, tokens=64), 28
    )


def pool_far(module: ModuleType = LAUNCH) -> list[str]:
    """The same of tokens that are pooled."""
    case = Compressed(seq_len=40, heads=1, phi="avg", l=32, d=8, l_sel=8, n_sel=3, dtype=HALF)
    return _far(module, case, 27)


def _far(module: ModuleType, case: Compressed, bits: int) -> list[str]:
    return far_problems(
        lambda of, x: found_by(of, case, x), module, case.tensors(),
        [1 << 27, 1 << bits, 1 << bits],
    )  # fmt: skip


PROOFS = proofs_of(
    (core, compressed_tuned, compressed_shapes, ties, compressed_far, pool_values, pool_far),
    {
        "pool": partial(core, cases=POOLED),
        "pool_in_32_bits": pool_far,
        "compressed": partial(core, cases=CORE[1:]),
        "compressed_ties": ties,
        "compressed_in_32_bits": compressed_far,
    },
)
