"""Proofs of the Triton kernels in Triton's interpreter: prints what is wrong, by proof, as JSON.

A process of its own, because the interpreter is chosen when triton is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from unittest import mock

import torch
from hypothesis import given

import nsa
from nsa.attention import attend
from nsa.attention.branches import Branches
from nsa.attention.tracing import count_ranges
from nsa.attention.triton.operators import SELECTED_OPERATOR, WINDOW_OPERATOR
from nsa.config import Way
from nsa.contract import ATTEND_RANGE, WIN_RANGE
from nsa.launch.plan import plan_launch
from nsa.launch.ranks import Ranks
from nsa.step.engine import Engine
from nsa.witness.self_test import self_test
from tests.attention.defects import defects
from tests.attention.equations import nsa as equations
from tests.attention.space import Example, examples, rounded, tensors
from tests.attention.triton_kernels import (
    BY_BLOCK,
    Case,
    compare,
    core,
    drawn,
    far_apart,
    found_by,
    judged,
    selection,
)
from tests.attention.triton_kernels import LAUNCH as launch
from tests.attention.triton_kernels import inputs as case_inputs
from tests.attention.triton_lists import list_problems
from tests.train.launching import SMOKE

CPU = torch.device("cpu")
SMALL = nsa.NSAConfig(
    dim=48, n_heads=12, n_kv_groups=2, d_k=16, d_v=16, l=8, d=4, l_sel=8, n_sel=4, w=20
)
by_kernels = partial(attend, way=Way(force_sdpa=True, kernels="triton"))


def tuned() -> list[str]:
    """The production's heads and widths in float16, and 128 wide with 16 heads."""
    half = torch.float16
    return core(launch, (
        Case(seq_len=130, heads=6, d_k=64, d_v=64, l_sel=64, n_sel=3, dtype=half, rows=128),
        Case(seq_len=40, heads=16, d_k=128, d_v=128, l_sel=16, dtype=half, rows=128),
        Case(seq_len=40, heads=1, d_k=128, d_v=64, l_sel=16, rows=16, every=False),
        Case(seq_len=130, heads=6, d_k=64, d_v=64, l_sel=64, n_sel=3, dtype=half, rows=64, run=64),
    ))  # fmt: skip


def tiles() -> list[str]:
    """Tiles of a few tokens, and of more than a whole piece, in both forms."""
    return core(launch, tuple(
        Case(seq_len=19, heads=3, l_sel=4, n_sel=3, piece=8, rows=rows, every=rows > 32, run=run)
        for rows in (16, 32, 64, 128)
        for run in (0, 10)
    ))  # fmt: skip


def space() -> list[str]:
    """Whole attention over the hypothesis space, against NumPy."""
    problems: list[str] = []
    seen = 0

    @drawn(10)
    @given(examples(longest=48))
    def run(example: Example) -> None:
        nonlocal seen
        x = rounded(example.numbers(), torch.float32)
        truth = equations(x, example.shape, compressed=example.compressed)
        if truth.margin < 1e-5:
            return  # rounding may choose another block
        seen += 1
        with torch.no_grad():
            out, _ = by_kernels(Branches(**tensors(x, torch.float32)), cfg=example.config())
        right = torch.from_numpy(truth.out)
        problems.extend(compare(str(example), out.double(), right, 1e-5))

    run()
    return problems if seen >= 5 else [*problems, f"only {seen} examples were compared"]


def trainer() -> list[str]:
    """The kernels train where the self-test agrees, are seen to run, and are barred where not."""
    words = ["--config", str(SMOKE), "--precision", "fp32", "--seq-len", "40"]
    toggles = {"NSA_USE_TRITON_SEL": "auto", "NSA_SELF_TEST": "on", "NSA_PREFILL_BATCHED": "1"}
    plan = plan_launch(words, toggles)
    engine = Engine(plan, Ranks(place=plan.place, device=CPU, grouped=False))
    problems = [] if engine.dispatch.selected(plan.toggles).value == "sdpa" else ["used untested"]
    tokens = torch.randint(256, (1, 41))
    found = self_test(engine).describe()["paths"]
    if not found["triton"]["agrees"] or engine.dispatch.selected(plan.toggles).value != "triton":
        problems.append(f"not chosen: {found}")
    losses = []
    for asked, wanted in (("auto", True), ("0", False)):
        engine.configure(plan.toggles.replaced({"NSA_USE_TRITON_SEL": asked}, "a test"))
        with count_ranges() as counts:
            losses.append(engine.loss(tokens, wrapped=False))
        losses[-1].backward()
        for name, one in ((ATTEND_RANGE, SELECTED_OPERATOR), (WIN_RANGE, WINDOW_OPERATOR)):
            if bool(counts.inside[name][one]) != wanted:
                problems.append(f"{asked}: {counts.inside}")
    if abs(float((losses[0] - losses[1]).detach())) > 1e-5:
        problems.append(f"the losses differ: {losses}")
    for module, name in ((launch.selected, "forward_mixed"), (launch, "window_and_terms")):
        right = getattr(module, name)
        wrong = lambda *x, of=right: (of(*x)[0] * 1.01, *of(*x)[1:])  # noqa: E731
        with mock.patch.object(module, name, wrong):
            found = self_test(engine).describe()["paths"]
        choices = [engine.dispatch.selected(plan.toggles), engine.dispatch.window(plan.toggles)]
        barred = "the self-test rejected triton" in choices[0].reason
        barred = barred and choices[1].value == "masked"
        # Nothing of this package is used then, and what takes its place was tested too.
        if found["triton"]["agrees"] or not barred or len(found) != 2:
            problems.append(f"a wrong kernel is chosen: {choices}, {found}")
    return problems


def lists() -> list[str]:
    """Each block's readers in each run, ascending, and how they are cut."""
    return list_problems()


def far(module: ModuleType = launch, run: int = 0) -> list[str]:
    """Offsets beyond 32 bits: keys and queries that lie 2^27 numbers apart."""
    case = Case(seq_len=40, heads=1, dtype=torch.float16, d_k=16, d_v=16, run=run)
    given, blocks = case_inputs(case), selection(case)
    with far_apart(given[:3], [1 << 27] * 3) as apart:
        mine = found_by(module, case, [*apart, given[3]], blocks)
    near = found_by(launch, case, given, blocks)
    return [f"{name} differs" for name in near if not torch.equal(near[name], mine[name])]


def far_by_block() -> list[str]:
    """The same where blocks own the work."""
    return far(run=24)


_JUDGES = {
    "selected": core,
    "selected_by_block": partial(core, cases=BY_BLOCK),
    "selected_lists": list_problems,
    "selected_in_32_bits": far,
}
PROOFS: dict[str, Callable[[], list[str]]] = {
    one.__name__: one
    for one in (
        core, tuned, tiles, space, lists, trainer, far, far_by_block,
    )
} | {
    name: partial(judged, judge, kind, name)
    for kind, judge in _JUDGES.items()
    for name in defects(kind)
}  # fmt: skip
