"""Proofs of the compressed branch's kernels in Triton's interpreter, as `triton_in_interpreter`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, get_args

import torch
from hypothesis import strategies as st

from nsa.attention.triton.tiles import TERMS
from nsa.config import Phi
from tests.attention.defects import defects
from tests.attention.triton_compressed import (
    CORE,
    POOLED,
    Compressed,
    core,
    found_by,
    inputs,
    right,
    wrong_blocks,
)
from tests.attention.triton_kernels import LAUNCH as launch
from tests.attention.triton_kernels import far_apart, judged, over_drawn

HALF = torch.float16


def pool_values() -> list[str]:
    """The same of keys and values that are pooled, gradients of their tokens too."""
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
    problems = core(launch, (production, sharp))
    whole = dict(TERMS)
    TERMS["float16"] = 3
    try:
        return problems + core(launch, (wide,))
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
    return over_drawn(cases, lambda case: core(launch, (case,)), examples=6)


def ties(module: Any = launch) -> list[str]:
    """Keys that are all the same: every block scores the same, and the first ones are taken.

    Two runs of blocks: those that the second one has to take in cost the last ones of the first.
    """
    case = Compressed(seq_len=64, heads=3, rows=64, tokens=64, blocks=8)
    q, k, *rest = inputs(case)
    same = [q, torch.ones_like(k), *rest]
    blocks = found_by(module, case, same)["blocks"]
    taken = {tuple(blocks[0, t, 0].tolist()) for t in range(60, 64)}
    problems = [] if taken == {(0, 1, 14, 15)} else [f"not the first ones: {taken}"]
    # And by the equations, which call exact ties no tie.
    return problems + wrong_blocks(case, blocks, right(case, same)[1].float().double())


def compressed_far(module: ModuleType = launch) -> list[str]:
    """Offsets beyond 32 bits: queries 2^27 numbers apart, keys, half as many, 2^28."""
    return _far(
        module, Compressed(seq_len=40, heads=1, l_sel=2, n_sel=6, dtype=HALF, tokens=64), 28
    )


def pool_far(module: ModuleType = launch) -> list[str]:
    """The same of tokens that are pooled."""
    case = Compressed(seq_len=40, heads=1, phi="avg", l=32, d=8, l_sel=8, n_sel=3, dtype=HALF)
    return _far(module, case, 27)


def _far(module: ModuleType, case: Compressed, bits: int) -> list[str]:
    given_ = inputs(case)
    with far_apart(given_[:3], [1 << 27, 1 << bits, 1 << bits]) as far:
        mine = found_by(module, case, [*far, given_[3]])
    near = found_by(launch, case, given_)
    return [f"{name} differs" for name in near if not torch.equal(near[name], mine[name])]


_JUDGES: dict[str, Callable[[ModuleType], list[str]]] = {
    "pool": partial(core, cases=POOLED),
    "pool_in_32_bits": pool_far,
    "compressed": partial(core, cases=CORE[1:]),
    "compressed_ties": ties,
    "compressed_in_32_bits": compressed_far,
}
PROOFS: dict[str, Callable[[], list[str]]] = {
    one.__name__: one
    for one in (
        core, compressed_tuned, compressed_shapes, ties, compressed_far, pool_values, pool_far,
    )
} | {
    name: partial(judged, judge, kind, name)
    for kind, judge in _JUDGES.items()
    for name in defects(kind)
}  # fmt: skip
