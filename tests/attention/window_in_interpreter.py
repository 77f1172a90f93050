"""Proofs of the kernels of the window, and of those between branches, in Triton's interpreter.

The truth is in float64, with the mask written out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime import interpreter

from nsa.attention import attend
from nsa.attention.triton import between as between_launch
from nsa.attention.triton import operators
from nsa.attention.triton import window as window_launch
from nsa.attention.triton.tiles import Tile, WindowCut
from nsa.config import NSAConfig, Way
from nsa.witness.equations import random_inputs
from tests.attention.triton_kernels import (
    SHAPES,
    Shape,
    branch,
    by_pair,
    checked,
    compare,
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
    q, k, v, grad = tensors
    cut = launch.choose_window_cut(cfg, case.seq_len, case.batch * case.groups)
    if case.cut is not None:
        tile = Tile(rows=case.cut[0], warps=1, stages=1)
        cut = WindowCut(
            forward=tile, query_gradient=tile, key_gradient=tile, keys=case.cut[1],
            pieces=case.pieces,
        )  # fmt: skip
    with mock.patch.object(launch, "choose_window_cut", lambda *_: cut):
        out, lse = launch.forward(q, k, v, cfg)
        dq, dk, dv = launch.backward(grad, q, k, v, out, lse, cfg)
    return {"out": out, "lse": by_pair(lse, case), "dq": dq, "dk": dk, "dv": dv}


def core(launch: ModuleType = window_launch, cases: tuple[Case, ...] = CORE) -> list[str]:
    """What the kernels of `launch` compute wrongly, write twice, or leave unwritten."""
    return held(launch, cases, found_by, right, of_one=True)


def window_tuned() -> list[str]:
    """As a device would cut it: the production's heads and widths in float16, 128 wide.

    And the widest window.
    """
    return core(window_launch, (
        Case(seq_len=150, w=80, heads=6, d_k=64, d_v=64, dtype=HALF, cut=None),
        Case(seq_len=70, w=200, heads=16, d_k=128, d_v=128, dtype=HALF, cut=None),
        Case(seq_len=200, w=100, d_k=128, d_v=64, cut=None),
        Case(seq_len=40, w=2**31 - 1, heads=2),
    ))  # fmt: skip


def window_space() -> list[str]:
    """Shapes drawn at random, gradients too."""
    cuts = st.sampled_from(((16, 16), (32, 16), (16, 32), (128, 64)))
    cases = st.builds(Case, **SHAPES, cut=cuts, pieces=st.integers(1, 3))
    return over_drawn(cases, lambda case: core(window_launch, (case,)), examples=6)


def window_operator() -> list[str]:
    """torch's own checks of an operator, and one graph for torch.compile, forward and backward."""
    case = Case(seq_len=24, w=10, heads=6, groups=2)
    q, k, v, grad = (x.contiguous() for x in inputs(case))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = operators.window(*leaves, case.w)
    kept = [x.detach() for x in (grad, *leaves, out, lse)]
    return checked(
        lambda *tensors: operators.window(*tensors, case.w)[0], leaves, grad,
        (operators.window, (*leaves, case.w)),
        (operators.window_backward, (*kept, case.w)),
    )  # fmt: skip


def window_far(launch: ModuleType = window_launch) -> list[str]:
    """Offsets beyond 32 bits: tokens that lie 2^27 numbers apart."""
    case = Case(seq_len=40, w=25, dtype=HALF)
    return far_problems(
        lambda of, x: found_by(of, case, x), (launch, window_launch), inputs(case), [1 << 27] * 3
    )


WINDOW_PROOFS = proofs_of(
    "window",
    (core, window_tuned, window_space, window_operator, window_far),
    {"window": core, "window_in_32_bits": window_far},
)


class Mixed(Shape):
    """Three branches and their gates."""

    def tensors(self) -> list[Tensor]:
        """The gradient, the branches and the gates: all but the first two lie as some views do.

        The window's heads lie outside its tokens, as masked attention leaves them; gates are
        columns of a wider product.
        """
        draw = torch.Generator().manual_seed(self.seq_len)
        shape = (self.batch, self.seq_len, self.heads, self.d_v)
        grad, cmp, sel, win = (torch.randn(shape, generator=draw) for _ in range(4))
        gates = torch.rand(*shape[:2], 3 * self.heads + 5, generator=draw).to(self.dtype)
        wide = torch.nn.functional.pad(sel, (2, 3)).to(self.dtype)[..., 2:-3]
        outer = win.to(self.dtype).transpose(1, 2).contiguous().transpose(1, 2)
        apart = gates[..., 4:-1].unflatten(-1, (self.heads, 3))
        return [grad.to(self.dtype), cmp, wide, outer, apart]


# Between them: tiles that end inside a token, a last tile that is cut, widths that fill no power
# of two, more than one batch element, less than one tile.
MIXED = (
    Mixed(seq_len=29, heads=6, batch=2, d_v=24),
    Mixed(seq_len=3, heads=5, batch=3, d_v=5),
    Mixed(seq_len=40, heads=2, d_v=128, dtype=HALF),
    Mixed(seq_len=70, heads=1, d_v=64, dtype=HALF),
)


NAMES = ("out", "d_cmp", "d_sel", "d_win", "d_gates")


def mixed_right(tensors: list[Tensor]) -> dict[str, Tensor]:
    """Output and gradients in float64."""
    grad, *branches, gates = (x.double().numpy() for x in tensors)
    out = sum(gates[..., n, None] * x for n, x in enumerate(branches))
    back = [grad * gates[..., n, None] for n in range(3)]
    d_gates = np.stack([np.einsum("bshd,bshd->bsh", grad, x) for x in branches], -1)
    found = map(torch.from_numpy, (out, *back, d_gates))
    return dict(zip(NAMES, found, strict=True))


def mixed_by(launch: ModuleType, tensors: list[Tensor]) -> dict[str, Tensor]:
    """The same by the kernels."""
    found = (launch.mix_forward(*tensors[1:]), *launch.mix_backward(*tensors))
    return dict(zip(NAMES, found, strict=True))


def mix_values(launch: ModuleType = between_launch) -> list[str]:
    """What the kernels of `launch` compute wrongly, write twice, or leave unwritten."""
    wrong: list[str] = []

    def found(launch: ModuleType, case: Mixed, tensors: list[Tensor]) -> dict[str, Tensor]:
        made = mixed_by(launch, tensors)
        kinds = [case.dtype, *(x.dtype for x in tensors[1:])]
        for (name, got), kind in zip(made.items(), kinds, strict=True):
            if got.dtype != kind or not got.is_contiguous():
                wrong.append(f"{name} of {case} is {got.dtype}, strides {got.stride()}")
        return made

    # The compressed branch comes in float32.
    right = lambda case: mixed_right(case.tensors())  # noqa: E731
    return held(launch, MIXED, found, right, exact=("d_cmp",)) + wrong


def mix_operator() -> list[str]:
    """torch's own checks, one graph, and the gradients of whole branches [B,S,G,h,Dv]."""
    case = Mixed(seq_len=11, heads=6, batch=2, dtype=HALF)
    grad, *given = case.tensors()
    leaves = [x.contiguous().requires_grad_() for x in given]
    kept = [x.detach() for x in (grad, *leaves)]
    by_group = [x.detach().unflatten(2, (2, 3)).requires_grad_() for x in leaves[:3]]

    def mixed(*branches: Tensor) -> Tensor:
        return operators.mix(*(x.flatten(2, 3) for x in branches[:3]), branches[3])

    problems = checked(
        mixed, [*by_group, leaves[3]], grad,
        (operators.mix, tuple(leaves)), (operators.mix_backward, tuple(kept)),
    )  # fmt: skip
    out = mixed(*by_group, leaves[3])
    grads = torch.autograd.grad(out, [*by_group, leaves[3]], grad)
    for got, right in zip((out, *grads), mixed_right(kept).values(), strict=True):
        problems += compare("the operator", got.flatten(2, -2).double().view_as(right), right, 2e-3)
    return problems


def mix_far(launch: ModuleType = between_launch) -> list[str]:
    """Offsets beyond 32 bits: heads that lie 2^30 numbers apart."""
    tensors = Mixed(seq_len=3, heads=3, dtype=HALF).tensors()
    apart = [1 << 30, 0, *[1 << 30] * 3]
    return far_problems(mixed_by, (launch, between_launch), tensors, apart, dim=2)


def launches() -> list[str]:
    """Kernels of a layer's core, forward and backward, where queries walk.

    And where the window is another's: its branches are then differentiated one by one.
    """
    cfg = NSAConfig(dim=8, n_heads=4, n_kv_groups=2, d_k=16, d_v=16, l=4, d=4, l_sel=4, n_sel=3,
                    w=8)  # fmt: skip
    x, _ = random_inputs(cfg, 40, dtype=torch.float32, device=torch.device("cpu"))
    leaves = [tensor.requires_grad_() for tensor in x.named().values()]
    started, run = [], interpreter.GridExecutor.__call__

    def counted(self: Any, *args: Any, **named: Any) -> Any:
        started[-1] += 1
        return run(self, *args, **named)

    with mock.patch.object(interpreter.GridExecutor, "__call__", counted):
        for window in ("triton", "masked"):
            started.append(0)
            out, _ = attend(x, cfg, Way(force_sdpa=True, selected="triton", window=window))
            started.append(0)
            torch.autograd.grad(out.sum(), leaves)
    return [f"{started} launches"] * (started != [4, 7, 5, 9])


BETWEEN_PROOFS = proofs_of(
    "between",
    (mix_values, mix_operator, mix_far, launches),
    {"mix": mix_values, "mix_in_32_bits": mix_far},
)
