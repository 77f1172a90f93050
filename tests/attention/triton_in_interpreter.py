"""Proofs of the Triton kernels in Triton's interpreter: prints what is wrong, by proof, as JSON.

A process of its own, because the interpreter is chosen when triton is imported.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType
from unittest import mock

import torch
from torch import Tensor

import nsa
from nsa.attention import attend
from nsa.attention.branches import Branches
from nsa.attention.tracing import count_ranges
from nsa.attention.triton.operators import SELECTED_OPERATOR, WINDOW_OPERATOR
from nsa.config import ModelConfig, NSAConfig, Way
from nsa.contract import ATTEND_RANGE, WIN_RANGE
from nsa.launch.plan import plan_launch
from nsa.launch.ranks import Ranks
from nsa.model import Layer, Whole
from nsa.rounding import Gap, error_of
from nsa.step.compiled import Compiled, compile_layers, count_compiled
from nsa.step.engine import Engine
from nsa.witness.self_test import self_test
from tests.attention.equations import Example, examples, rounded, tensors
from tests.attention.equations import nsa as equations
from tests.attention.triton_kernels import LAUNCH as launch
from tests.attention.triton_kernels import compare, far_problems, over_drawn, proofs_of
from tests.attention.triton_kernels import inputs as case_inputs
from tests.attention.triton_selected import (
    BY_BLOCK,
    Case,
    core,
    found_by,
    list_problems,
)
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
        Case(seq_len=40, heads=1, d_k=128, d_v=64, l_sel=16, rows=16),
        Case(seq_len=130, heads=6, d_k=64, d_v=64, l_sel=64, n_sel=3, dtype=half, rows=64, run=64),
    ))  # fmt: skip


def tiles() -> list[str]:
    """Tiles of a few tokens, and of more than a whole piece, in both forms."""
    return core(launch, tuple(
        Case(seq_len=19, heads=3, l_sel=4, n_sel=3, piece=8, rows=rows, run=run)
        for rows in (16, 32, 64, 128)
        for run in (0, 10)
    ))  # fmt: skip


def space() -> list[str]:
    """Whole attention over the hypothesis space, against NumPy."""
    seen: list[Example] = []

    def judge(example: Example) -> list[str]:
        x = rounded(example.numbers(), torch.float32)
        truth = equations(x, example.config)
        if truth.margin < 1e-5:
            return []  # rounding may choose another block
        seen.append(example)
        with torch.no_grad():
            out, _ = by_kernels(Branches(**tensors(x, torch.float32)), cfg=example.config)
        return compare(str(example), out.double(), torch.from_numpy(truth.out), 1e-5)

    problems = over_drawn(examples(longest=48), judge, examples=10)
    return problems if len(seen) >= 5 else [*problems, f"only {len(seen)} were compared"]


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
        choice = engine.dispatch.selected(plan.toggles)
        barred = "the self-test rejected triton" in choice.reason
        # Nothing of this package is used then, and what takes its place was tested too.
        if found["triton"]["agrees"] or not barred or len(found) != 2:
            problems.append(f"a wrong kernel is chosen: {choice}, {found}")
    return problems


def far(module: ModuleType = launch, run: int = 0) -> list[str]:
    """Offsets beyond 32 bits: keys and queries that lie 2^27 numbers apart."""
    case = Case(seq_len=40, heads=1, dtype=torch.float16, run=run)
    return far_problems(
        lambda of, x: found_by(of, case, x), module, case_inputs(case), [1 << 27] * 3
    )


def far_by_block() -> list[str]:
    """The same where blocks own the work."""
    return far(run=24)


OF_A_LAYER = NSAConfig(
    dim=32, n_heads=2, n_kv_groups=1, d_k=16, d_v=16, l=16, d=8, l_sel=16, n_sel=3, w=16
)


def gradients(layer: Layer, x: Tensor, by: Whole | None) -> dict[str, Tensor]:
    """The output, and gradients of its squares."""
    leaves = {"input": x, **dict(layer.named_parameters())}
    out = layer(x, by=by)
    found = torch.autograd.grad(out.square().sum(), list(leaves.values()))
    return {"output": out.detach(), **dict(zip(leaves, found, strict=True))}


def compiled_layer() -> list[str]:
    """What differs between the layer and its one graph, in numbers, blocks and operators."""
    torch.manual_seed(0)
    layer = Layer(ModelConfig(vocab_size=11, n_layers=1, attention=OF_A_LAYER))
    layer.attention.way = Way(force_sdpa=True, kernels="triton")
    x = torch.randn(1, 72, OF_A_LAYER.dim, requires_grad=True)
    before = gradients(layer, x, None)
    blocks = layer.attention.last_blocks
    names: list[str] = []

    def noting(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        names.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def boxed(graph: torch.fx.GraphModule, given: object) -> object:
        return make_boxed_func(noting(graph, given).forward)

    start = count_compiled()
    after = gradients(layer, x, compile_layers(aot_autograd(fw_compiler=boxed)).layer)
    gaps = [
        Gap.twice(what=what, error=error_of(after[what], right).whole, ours=0.0)
        for what, right in before.items()
    ]
    did = count_compiled()
    assert blocks is not None and layer.attention.last_blocks is not None
    missing = {"nsa.core.default", "nsa.core_backward.default"} - set(names)
    return [
        *(str(gap) for gap in gaps if gap.too_wide),
        *[f"{did} after {start}"] * (did != Compiled(start.graphs + 1, start.breaks)),
        *["other blocks"] * (not torch.equal(blocks, layer.attention.last_blocks)),
        *(f"{name} is not in the graph" for name in sorted(missing)),
    ]


PROOFS = proofs_of(
    (core, tuned, tiles, space, list_problems, trainer, far, far_by_block),
    {
        "selected": core,
        "selected_by_block": partial(core, cases=BY_BLOCK),
        "selected_lists": list_problems,
        "selected_in_32_bits": far,
    },
)
