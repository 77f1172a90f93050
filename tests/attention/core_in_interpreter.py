"""Proofs of the kernels that serve all branches, in the interpreter: what is wrong, by proof.

The truth is torch's in float64, with all masks written out; which blocks the equations choose is
for `compressed_in_interpreter` to say, here they are those that the kernels chose.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any, get_args
from unittest import mock

import torch
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime import interpreter

from nsa.attention import attend
from nsa.attention.branches import Branches
from nsa.attention.selection import block_bits, ranges_v1
from nsa.attention.triton import operators
from nsa.attention.triton.selected_tiles import Cut
from nsa.config import Phi, Way
from tests.attention import triton_selected
from tests.attention.compressed_in_interpreter import ended, pooled
from tests.attention.triton_kernels import (
    BOUND,
    LAUNCH,
    SHAPES,
    Shape,
    apart,
    branch,
    by_core,
    checked,
    compare,
    cut_as,
    far_problems,
    of_blocks,
    over_drawn,
    poisoned,
    proofs_of,
    written_once,
)

HALF = torch.float16
NAMES = ("q", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win", "gates")


@dataclass(frozen=True, kw_only=True)
class Case(Shape):
    """A shape. run: positions that blocks own at a time; with 0 queries walk."""

    l: int = 8  # noqa: E741
    d: int = 4
    l_sel: int = 8
    n_sel: int = 3
    w: int = 16
    run: int = 0

    def tensors(self) -> list[Tensor]:
        """By NAMES, and a gradient; not contiguous. Some gates are 0, as sigmoid may round."""
        draw = torch.Generator().manual_seed(self.seq_len)
        h, g = self.heads * self.groups, self.groups
        widths = [(h, self.d_k), *[(g, self.d_k), (g, self.d_v)] * 3, (h, 3), (h, self.d_v)]
        made = [apart(self.batch, self.seq_len, *width, by=draw).to(self.dtype) for width in widths]
        made[7] = made[7].sigmoid()
        made[7][:, 2::5, :, self.seq_len % 3] = 0.0
        return made

    def by_block(self) -> Cut:
        """How the selected branch is cut where blocks own the work."""
        alike = triton_selected.Case(
            seq_len=self.seq_len, heads=self.heads, groups=self.groups, batch=self.batch,
            d_k=self.d_k, d_v=self.d_v, l_sel=self.l_sel, n_sel=self.n_sel, run=self.run,
        )  # fmt: skip
        return alike.cut()


# Between them: no compressed key at all, heads that fill no tile, a last tile and block that are
# cut, a word of bits and more, windows of one token and longer than S, blocks that own the work;
# last a window whose keys are walked in pieces.
CORE = (
    Case(seq_len=37, heads=3, groups=2, batch=2, d_k=24, d_v=8),
    Case(seq_len=45, heads=2, l=2, d=1, l_sel=1, n_sel=4, w=1),
    Case(seq_len=42, heads=3, groups=2, run=14),
    Case(seq_len=5, heads=16, w=64),
    Case(seq_len=50, heads=6, d_k=64, d_v=64, dtype=HALF),
    Case(seq_len=40, heads=4, d_k=128, d_v=128, w=24, dtype=HALF),
    Case(seq_len=33, heads=16, w=64),
)


def right(case: Case, tensors: list[Tensor], blocks: Tensor) -> list[Tensor]:
    """The output, and the gradients of all tensors but the last."""
    leaves = [x.double().requires_grad_() for x in tensors[:-1]]
    q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates = leaves
    k_cmp, v_cmp = (pooled(x, case.l, case.d) for x in (k_cmp, v_cmp))
    token = torch.arange(case.seq_len)
    near = (token <= token[:, None]) & (token > token[:, None] - case.w)
    branches = (
        (k_cmp, v_cmp, ended(k_cmp.shape[1], case.seq_len, case.l, case.d)),
        (k_sel, v_sel, of_blocks(blocks, case.l_sel)),
        (k_win, v_win, near[:, None]),
    )
    q = q.unflatten(2, (case.groups, case.heads))
    outs = [branch(q, *one)[0].flatten(2, 3) for one in branches]
    total = (torch.stack(outs, -2) * gates[..., None]).sum(-2)
    grads = torch.autograd.grad(total, leaves, tensors[-1].double(), materialize_grads=True)
    return [total.detach(), *grads]


def found_by(launch: ModuleType, case: Case, tensors: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """The same by the kernels; and the blocks, after their bits are held against them."""
    cfg, (q, *others, grad) = case.config(), tensors
    q = q.unflatten(2, (case.groups, case.heads))
    with cut_as(launch, **({"selected": case.by_block()} if case.run else {})):
        made = by_core(launch, cfg, (q, *others), grad)
    blocks, bits, (dq, *grads) = made["blocks"], made["bits"], made["grads"]
    number = torch.arange(cfg.n_blocks(case.seq_len))
    word, bit = number // 32, number % 32
    told = ((bits[:, word] >> bit[:, None]) & 1).view(case.batch, case.groups, -1, case.seq_len)
    wanted = (blocks[..., None] == number).any(-2).permute(0, 2, 3, 1)
    packed = block_bits(ranges_v1(blocks, cfg), cfg)
    if not torch.equal(told.bool(), wanted) or not torch.equal(packed, bits):
        raise AssertionError("the bits are not those of the blocks")
    return [made["out"], dq.flatten(2, 3), *grads], blocks


def core(launch: ModuleType = LAUNCH, cases: tuple[Case, ...] = CORE) -> list[str]:
    """What the kernels of `launch` compute wrongly, write twice, leave unwritten or vary."""
    problems: list[str] = []
    for case in cases:
        tensors = case.tensors()
        try:
            with written_once(problems), poisoned():
                mine, blocks = found_by(launch, case, tensors)
                again, _ = found_by(launch, case, tensors)
        except AssertionError as error:
            return [*problems, f"{error} in {case}"]
        problems += [f"other bits in {case}"] * any(
            not torch.equal(one, other) for one, other in zip(mine, again, strict=True)
        )
        truth = right(case, tensors, blocks)
        for name, got, wanted in zip(("out", *NAMES), mine, truth, strict=True):
            # A gradient that is 0 everywhere is held against 1.
            base = 1.0 if wanted.abs().max() < 1e-12 else 0.0
            problems += compare(
                f"{name} of {case}", got.double() + base, wanted + base, BOUND[case.dtype]
            )
        if problems:
            break
    return problems


def core_space() -> list[str]:
    """Shapes drawn at random."""
    more = {"l": st.sampled_from((4, 8)), "run": st.sampled_from((0, 0, 14))}
    cases = st.builds(Case, **SHAPES, **more)
    return over_drawn(cases, lambda case: core(LAUNCH, (case,)), examples=8)


def core_operator() -> list[str]:
    """torch's own checks, and one graph, forward and backward, of whole attention."""
    return [text for phi in get_args(Phi) for text in _operators_of(phi)]


def _operators_of(phi: Phi) -> list[str]:
    case = Case(seq_len=24, heads=2, groups=2)
    cfg, tensors = replace(case.config(), phi=phi), [x.contiguous() for x in case.tensors()]
    if phi == "mlp":
        n_keys = cfg.n_compressed(case.seq_len)
        tensors[1:3] = [x[:, :n_keys].contiguous() for x in tensors[1:3]]
    q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates = tensors[:-1]
    rows, told = q.unflatten(2, (2, 2)), (cfg.l, cfg.d)
    given_ = (rows, k_win, v_win, k_cmp, v_cmp, cfg.w, *told, cfg.phi)
    win, win_lse, terms, values = operators.window_and_terms(*given_)
    cmp, cmp_lse, lse = operators.compressed(rows, terms, values, *told)
    top = (rows, terms, lse, *told, cfg.l_sel, cfg.n_sel)
    _, bits = operators.top_blocks(*top)
    inputs = (rows, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates, bits, terms, values, cmp,
              cmp_lse, win, win_lse)  # fmt: skip
    numbers = (cfg.w, *told, cfg.l_sel, cfg.n_sel, cfg.phi)
    _, sel, sel_lse = operators.core(*inputs, *numbers)
    no_gradient = ("test_schema", "test_faketensor")
    leaves = [x.clone().requires_grad_() for x in tensors[:-1]]
    way = Way(force_sdpa=True, kernels="triton")
    return checked(
        lambda *x: attend(Branches(**dict(zip(NAMES, x, strict=True))), cfg, way)[0],
        leaves, tensors[-1],
        (operators.window_and_terms, given_, no_gradient),
        (operators.compressed, (rows, terms, values, *told), no_gradient),
        (operators.top_blocks, top, no_gradient),
        (operators.core, (*inputs, *numbers), no_gradient),
        (operators.core_backward, (tensors[-1], *inputs, sel, sel_lse, *numbers), no_gradient),
    )  # fmt: skip


def launches() -> list[str]:
    """Kernels of a layer's core, forward and backward, where queries walk."""
    case = Case(seq_len=40, heads=2, groups=2)
    leaves = [x.contiguous().requires_grad_() for x in case.tensors()[:-1]]
    x = Branches(**dict(zip(NAMES, leaves, strict=True)))
    started, run = [], interpreter.GridExecutor.__call__

    def counted(self: Any, *args: Any, **named: Any) -> Any:
        started[-1] += 1
        return run(self, *args, **named)

    with mock.patch.object(interpreter.GridExecutor, "__call__", counted):
        started.append(0)
        out, _ = attend(x, case.config(), Way(force_sdpa=True, kernels="triton"))
        started.append(0)
        torch.autograd.grad(out.sum(), leaves)
    return [f"{started} launches"] * (started != [4, 7])


def core_far(launch: ModuleType = LAUNCH) -> list[str]:
    """Offsets beyond 32 bits: tokens that lie 2^27 numbers apart."""
    case = Case(seq_len=40, heads=2, dtype=HALF)

    def call(module: ModuleType, tensors: list[Tensor]) -> dict[str, Tensor]:
        return dict(zip(("out", *NAMES), found_by(module, case, tensors)[0], strict=True))

    return far_problems(call, launch, case.tensors(), [1 << 27] * 8)


# Of CORE a planted defect is seen by one of these.
PROOFS = proofs_of(
    (core, core_space, core_operator, core_far, launches),
    {"all": partial(core, cases=(*CORE[:3], CORE[-1])), "all_in_32_bits": core_far},
)
