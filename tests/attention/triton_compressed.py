"""What the Triton kernels of the compressed branch compute, held against float64 and NumPy.

Runs where Triton's interpreter does. `core` takes the launching module as an argument, so that a
copy with a planted defect is judged like it.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

import nsa
from nsa.attention.triton.tiles import CompressedCut, Tile
from nsa.config import Phi
from tests.attention.equations import Shape, select
from tests.attention.triton_kernels import (
    BOUND,
    LAUNCH,
    alone,
    compare,
    config_of,
    cut_as,
    poisoned,
    written_once,
)

# Where the last block taken and the first one left out are nearer, rounding may choose.
TIE = 1e-5


@dataclass(frozen=True, kw_only=True)
class Compressed:
    """A shape, and how its work is cut: of CompressedCut. sharp: how large keys are.

    phi: "mlp", of keys and values that are compressed already, or "avg".
    """

    seq_len: int
    heads: int
    groups: int = 1
    batch: int = 1
    d_k: int = 16
    d_v: int = 16
    l: int = 4  # noqa: E741 - the paper's letter
    d: int = 2
    l_sel: int = 4
    n_sel: int = 4
    phi: Phi = "mlp"
    dtype: torch.dtype = torch.float32
    rows: int = 32
    keys: int = 16
    owned: int = 16
    piece: int = 24
    tokens: int = 32
    blocks: int = 16
    sharp: float = 1.0

    def config(self) -> nsa.NSAConfig:
        """The package's config for it."""
        return config_of(
            self, l=self.l, d=self.d, l_sel=self.l_sel, n_sel=self.n_sel, phi=self.phi, w=1
        )

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


def inputs(case: Compressed) -> list[Tensor]:
    """q [B,S,G,h,Dk] and a gradient of a type, k, v [B,N,G,D] in float32; not contiguous.

    k, v of phi "avg": [B,S,G,D], of q's type.
    """
    generator = torch.Generator().manual_seed(case.seq_len)
    g, h, n, kind = case.groups, case.heads, case.seq_len, case.dtype
    if case.phi == "mlp":
        n, kind = case.config().n_compressed(case.seq_len), torch.float32

    def normal(*shape: int) -> Tensor:
        wide = torch.randn(case.batch, *shape[:-1], shape[-1] + 3, generator=generator)
        return wide[..., 1:-2]

    q = (1.5 * normal(case.seq_len, g, h, case.d_k)).to(case.dtype)
    grad = normal(case.seq_len, g, h, case.d_v).to(case.dtype)
    k, v = (normal(n, g, width).to(kind) for width in (case.d_k, case.d_v))
    return [q, case.sharp * k, v, grad]


def right(case: Compressed, tensors: list[Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """Everything in float64 with the mask written out; and probabilities [B,G,S,h,N].

    lse: of keys rounded to the type, as nothing else is. exact_lse: of those that choose.
    """
    q, k, v = leaves = [x.double().requires_grad_() for x in tensors[:3]]
    if case.phi == "avg":
        begins = range(0, case.seq_len - case.l + 1, case.d)
        k, v = (
            torch.stack([x[:, i : i + case.l].mean(1) for i in begins], 1) if begins else x[:, :0]
            for x in (k, v)
        )
    last = torch.arange(k.shape[1]) * case.d + case.l - 1
    seen = (last <= torch.arange(case.seq_len)[:, None])[:, None]
    scores = torch.einsum("bsghd,bngd->bgshn", q, k) * case.d_k**-0.5
    p = torch.nan_to_num(scores.masked_fill(~seen, -torch.inf).softmax(-1)) * seen
    out = torch.einsum("bgshn,bngd->bsghd", p, v)
    grads = torch.autograd.grad(out, leaves, tensors[3].double())
    truth = {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), grads, strict=True))}
    for name, keys in (("lse", k.to(case.dtype).double()), ("exact_lse", k)):
        scores = torch.einsum("bsghd,bngd->bgshn", q, keys).detach() * case.d_k**-0.5
        truth[name] = scores.masked_fill(~seen, -torch.inf).logsumexp(-1) * np.log2(np.e)
    return truth, p.detach()


def wrong_blocks(case: Compressed, blocks: Tensor, p: Tensor) -> list[str]:
    """Tokens [B,S,G] whose blocks are not those of the equations; near ties aside."""
    shape = Shape(groups=case.groups, heads=case.heads, d_k=case.d_k, d_v=case.d_v, l=case.l,
                  d=case.d, lp=case.l_sel, n=case.n_sel, w=1)  # fmt: skip
    found, compared = [], 0
    for b, t, g in np.ndindex(case.batch, case.seq_len, case.groups):
        taken, margin = select(p[b, g, t].numpy(), t, shape)
        wanted = taken + [-1] * (case.n_sel - len(taken))
        compared += margin >= TIE
        if margin >= TIE and blocks[b, t, g].tolist() != wanted:
            found.append(f"blocks of token {t}: {blocks[b, t, g].tolist()}, not {wanted}")
    few = compared < case.batch * case.seq_len * case.groups * 0.9
    return found[:3] + ["too many ties"] * few


def found_by(launch: ModuleType, case: Compressed, tensors: list[Tensor]) -> dict[str, Any]:
    """The same by the kernels, and the blocks."""
    cfg, cut = case.config(), case.cut()
    with cut_as(launch, compressed=cut, top=cut):
        found = alone(launch, 0, cfg, tensors)
        exact = found["exact_lse"].reshape(case.batch * case.groups, -1)
        terms = found.pop("terms")
        blocks, _ = launch.compressed.top_blocks(tensors[0], terms, exact, cfg)
    return {**found, "blocks": blocks}


def core(launch: ModuleType = LAUNCH, cases: tuple[Compressed, ...] = CORE) -> list[str]:
    """What the kernels of `launch` compute wrongly, write twice, or leave unwritten."""
    problems: list[str] = []
    for case in cases:
        tensors = inputs(case)
        with written_once(problems), poisoned():
            mine = found_by(launch, case, tensors)
        truth, p = right(case, tensors)
        for name, value in truth.items():
            # One chooses blocks, the other is of keys as they were rounded: both as exact as
            # float32, whatever the type of the queries.
            bound = BOUND[torch.float32 if name.endswith("lse") else case.dtype]
            problems += compare(f"{name} of {case}", mine[name].double(), value, bound)
        problems += wrong_blocks(case, mine["blocks"], p)
        if problems:
            break
    return problems
