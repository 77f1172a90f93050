"""Proofs and planted defects of all Triton kernels, in Triton's interpreter.

Answers the name of a proof, or KIND/NAME of a planted defect, with what is wrong there: asked by
`forks`, with TRITON_INTERPRET=1, which triton reads as it is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any, get_args
from unittest import mock

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime import interpreter

from nsa.attention import attend
from nsa.attention.branches import Branches
from nsa.attention.tracing import count_ranges, told
from nsa.attention.triton import TERMS, operators
from nsa.attention.triton.operators import SELECTED_OPERATOR, WINDOW_OPERATOR
from nsa.config import Phi, Way
from nsa.contract import ATTEND_RANGE, WIN_RANGE
from nsa.launch.plan import plan_launch
from nsa.launch.ranks import Ranks
from nsa.step.engine import Engine
from nsa.witness.self_test import self_test
from tests.attention.triton_cases import (
    CASES,
    HALF,
    NAMES,
    TUNED,
    Case,
    cases,
    core,
    found_by,
    ties,
)
from tests.attention.triton_kernels import LAUNCH, differing, judged
from tests.attention.triton_lists import list_problems
from tests.forks import serve
from tests.train.launching import SMOKE

CPU = torch.device("cpu")
KERNELS = Way(force_sdpa=True, kernels="triton")


@st.composite
def _cases(draw: st.DrawFn) -> Case:
    d, of = draw(st.sampled_from((1, 2, 3, 4))), st.sampled_from
    return Case(
        seq_len=draw(st.integers(1, 48)), heads=draw(st.integers(1, 16)),
        groups=draw(st.integers(1, 2)), batch=draw(st.integers(1, 2)),
        d_k=draw(st.integers(1, 33)), d_v=draw(st.integers(1, 33)), phi=draw(of(get_args(Phi))),
        dtype=draw(of((torch.float32, HALF))), l=d * draw(st.integers(1, 3)), d=d,
        l_sel=d * draw(of((1, 2, 3, 4))), n_sel=draw(of((3, 4, 7, 16))), w=draw(st.integers(1, 50)),
        rows=draw(of((0, 16, 64))), keys=draw(of((16, 32))), owned=draw(of((16, 32))),
        piece=draw(of((7, 32))), blocks=draw(of((16, 32))), pieces=draw(st.integers(1, 3)),
        run=draw(of((0, 0, 14))),
    )  # fmt: skip


def space() -> list[str]:
    """Any allowed shape, the same ones every time, against float64 and NumPy."""
    problems: list[str] = []

    @settings(
        max_examples=24, derandomize=True, database=None, deadline=None, phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(_cases())
    def over_space(case: Case) -> None:
        problems.extend(core(LAUNCH, (case,)))

    over_space()
    return problems


def three_terms() -> list[str]:
    """A key of bf16 is a sum of three: the same code, here with numbers of float16."""
    with mock.patch.dict(TERMS, float16=3):
        return core(LAUNCH, cases("three_terms"))


# Blocks that are compressed are so long that a token inside is beyond them, too.
FAR = cases("far")[0]


def far(launch: ModuleType = LAUNCH, case: Case = FAR, of_keys: int = 27) -> list[str]:
    """Offsets beyond 32 bits: tokens 2^27 numbers apart, fewer compressed keys 2^28."""
    steps = [1 << 27] * 8
    steps[1:3] = [1 << of_keys] * 2
    return differing(lambda of, x: found_by(of, case, x), launch, case.tensors(), steps)


compressed_far = partial(
    far, case=replace(FAR, phi="mlp", l=4, d=2, l_sel=2, n_sel=6, rows=32, tokens=64), of_keys=28
)


def operators_are_sound() -> list[str]:
    """torch's own checks, and one graph, forward and backward, of whole attention."""
    return [text for phi in get_args(Phi) for text in _operators_of(phi)]


def _operators_of(phi: Phi) -> list[str]:
    case = Case(seq_len=24, heads=2, groups=2, n_sel=3, phi=phi)
    cfg, (q, *others, grad) = case.config(), [x.contiguous() for x in case.tensors()]
    k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates = others
    shape = told(cfg)
    first = (q, k_win, v_win, k_cmp, v_cmp, shape)
    win, win_lse, terms, values = operators.window_and_terms(*first)
    cmp, cmp_lse, lse = operators.compressed(q, terms, values, shape)
    top = (q, terms, lse, shape)
    _, bits = operators.top_blocks(*top)
    inputs = (q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates, bits, terms, values, cmp,
              cmp_lse, win, win_lse)  # fmt: skip
    _, sel, sel_lse = operators.core(*inputs, shape)
    problems = []
    for one, given_ in (
        (operators.window_and_terms, first),
        (operators.compressed, (q, terms, values, shape)),
        (operators.top_blocks, top),
        (operators.core, (*inputs, shape)),
        (operators.core_backward, (grad, *inputs, sel, sel_lse, shape)),
    ):
        kinds = ("test_schema", "test_faketensor")  # none has a gradient of its own
        said = torch.library.opcheck(one, given_, test_utils=kinds, raise_exception=False)
        problems += [f"{name}: {text}" for name, text in said.items() if text != "SUCCESS"]
    leaves, pairs = _leaves([q, *others]), []

    def attention(*x: Tensor) -> Tensor:
        return attend(Branches(**dict(zip(NAMES, x, strict=True))), cfg, KERNELS)[0]

    for run in (attention, torch.compile(attention, fullgraph=True, backend="aot_eager")):
        out = run(*leaves)
        pairs.append([out, *torch.autograd.grad(out, leaves, grad)])
    return problems + ["compiled"] * any(not torch.equal(a, b) for a, b in zip(*pairs, strict=True))


def _leaves(tensors: list[Tensor]) -> list[Tensor]:
    """As attention is given them, all heads of a query in one."""
    made = [tensors[0].flatten(2, 3), *tensors[1:]]
    return [x.clone().contiguous().requires_grad_() for x in made]


def launches() -> list[str]:
    """Kernels of a layer's core, forward and backward, where queries walk."""
    case = Case(seq_len=40, heads=2, groups=2, n_sel=3)
    leaves = _leaves(case.tensors()[:-1])
    started, run = [], interpreter.GridExecutor.__call__

    def counted(self: Any, *args: Any, **named: Any) -> Any:
        started[-1] += 1
        return run(self, *args, **named)

    with mock.patch.object(interpreter.GridExecutor, "__call__", counted):
        started.append(0)
        out, _ = attend(Branches(**dict(zip(NAMES, leaves, strict=True))), case.config(), KERNELS)
        started.append(0)
        torch.autograd.grad(out.sum(), leaves)
    return [f"{started} launches"] * (started != [4, 7])


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
    for module, name in ((LAUNCH.selected, "forward_mixed"), (LAUNCH, "window_and_terms")):
        right = getattr(module, name)
        wrong = lambda *x, of=right: (of(*x)[0] * 1.01, *of(*x)[1:])  # noqa: E731
        with mock.patch.object(module, name, wrong):
            found = self_test(engine).describe()["paths"]
        choice = engine.dispatch.selected(plan.toggles)
        barred = "the self-test rejected triton" in choice.reason
        # Nothing of this package is used then, and what takes its place was tested too.
        if found["triton"]["agrees"] or not barred or len(found) != 2:
            problems.append(f"a wrong kernel is chosen: {choice}, {found}")
    return problems


PROOFS: dict[str, Callable[[], list[str]]] = {
    **{kernel: partial(core, LAUNCH, cases) for kernel, cases in CASES.items()},
    "launches": launches,
    "tuned": partial(core, LAUNCH, TUNED),
    "three terms": three_terms,
    "space": space,
    "ties": ties,
    "lists": list_problems,
    "operators": operators_are_sound,
    "trainer": trainer,
    "far": far,
    "far by block": partial(far, case=replace(FAR, run=24)),
    "compressed far": compressed_far,
}
# Who judges a copy of the kernels with a planted defect, by the kind of it.
JUDGES: dict[str, Callable[[ModuleType], list[str]]] = {
    **{kernel: partial(core, cases=cases) for kernel, cases in CASES.items()},
    "selected": partial(core, cases=CASES["selected"] + CASES["selected_by_block"]),
    "selected_lists": list_problems,
    "compressed_ties": ties,
    "in_32_bits": far,
    "compressed_in_32_bits": compressed_far,
}


def problems_of(name: str) -> list[str]:
    """What is wrong in a proof, or what the judge of its kind sees of a planted defect."""
    kind, _, defect = name.partition("/")
    return judged(JUDGES[kind], kind, defect) if defect else PROOFS[name]()


if __name__ == "__main__":
    serve(problems_of)
