"""Proofs of the Triton kernels in Triton's interpreter: prints what is wrong, by proof, as JSON.

    TRITON_INTERPRET=1 python -m tests.attention.triton_in_interpreter NAME ...

A process of its own, because the interpreter is chosen when triton is imported.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from hypothesis import HealthCheck, Phase, given, settings
from torch import Tensor

import nsa
from nsa.attention.api import attend
from nsa.attention.branches import Branches
from nsa.attention.selection import build_ranges
from nsa.attention.tracing import count_ranges
from nsa.attention.triton.selected import launch, operators
from nsa.attention.triton.window import launch as window_launch
from nsa.launch.plan import plan_launch
from nsa.launch.ranks import Ranks
from nsa.train.engine import Engine
from nsa.witness.equations import measure
from nsa.witness.self_test import self_test
from tests.attention.defects import defects
from tests.attention.equations import nsa as equations
from tests.attention.space import Example, examples, rounded, tensors
from tests.attention.triton_kernels import (
    BY_BLOCK,
    CORE,
    Case,
    compare,
    core,
    found_by,
    planted,
    selection,
)
from tests.attention.triton_kernels import inputs as case_inputs
from tests.attention.triton_lists import list_problems, offset_problems
from tests.train.launching import SMOKE

CPU = torch.device("cpu")
SMALL = nsa.NSAConfig(
    dim=48, n_heads=12, n_kv_groups=2, d_k=16, d_v=16, l=8, d=4, l_sel=8, n_sel=4, w=20
)
MUTANTS = defects("selected", "selected_by_block", "selected_lists")
by_kernels = partial(attend, path="batched", force_sdpa=True, selected="triton")


def values() -> list[str]:
    """Outputs, log-sum-exp and gradients, written once and everywhere."""
    return core()


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

    @settings(
        max_examples=10, derandomize=True, database=None, deadline=None, phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
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


def whole() -> list[str]:
    """The trainer's self-test: everything and its gradients, float32 and float16."""
    problems = []
    for seq_len, dtype in ((3, torch.float32), (77, torch.float32), (77, torch.float16)):
        found = measure(partial(by_kernels, cfg=SMALL), SMALL, seq_len, dtype=dtype, device=CPU)
        problems += [f"S={seq_len}, {dtype}: {text}" for text in found.problems]
    return problems


def same_bits() -> list[str]:
    """Twice the same, and what comes later changes nothing before: bit by bit."""
    problems, at = [], 20
    for case in (
        Case(seq_len=30, heads=6, groups=2, l_sel=4, rows=16, every=False),
        Case(seq_len=24, heads=2, l_sel=4, rows=16, run=16),
    ):
        given, blocks = case_inputs(case), selection(case)
        first, second = (found_by(launch, case, given, blocks) for _ in range(2))
        problems += [name for name in first if not torch.equal(first[name], second[name])]
        later = [x.clone() for x in given]
        for x in later[:3]:
            x[:, at:] += 1
        third = found_by(launch, case, later, blocks)
        same = torch.equal(first["out"][:, :at], third["out"][:, :at])
        problems += [] if same else ["the future"]
    return problems


def repeats() -> list[str]:
    """Repeated and unordered blocks are a set; with all blocks read, it is dense attention."""
    case = Case(seq_len=40, heads=2, n_sel=6, piece=8)
    given, blocks = case_inputs(case), selection(case)
    twice = blocks.clone()
    twice[..., -1] = blocks[..., 0]
    few = Case(**{**vars(case), "n_sel": 12})
    doubled = torch.cat((blocks.flip(-1), blocks), -1)
    a, b = found_by(launch, case, given, blocks), found_by(launch, few, given, doubled)
    problems = [f"repeats change {n}" for n in a if not torch.equal(a[n], b[n])]
    everything = torch.arange(6).expand(1, 40, 1, 6)
    everything = everything.masked_fill(everything > torch.arange(40)[:, None, None] // 8, -1)
    out = found_by(launch, case, given, everything)["out"]
    q, k, v, _ = given
    k, v = (x.expand(-1, -1, 2, -1).transpose(1, 2) for x in (k, v))
    dense = torch.nn.functional.scaled_dot_product_attention(
        q[:, :, 0].transpose(1, 2), k, v, is_causal=True
    )
    return problems + compare("dense", out[:, :, 0].double(), dense.transpose(1, 2).double(), 1e-5)


def operator() -> list[str]:
    """torch's own checks of an operator, and one graph for torch.compile, forward and backward."""
    cfg = SMALL
    case = Case(seq_len=24, heads=6, groups=2)
    q, k, v, grad = (x.contiguous() for x in case_inputs(case))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    ranges = build_ranges(selection(case), cfg, "v2")
    bits = operators.selected_bits(ranges, cfg.l_sel)
    numbers = (cfg.l_sel, cfg.n_sel)
    out, lse = operators.selected(*leaves, bits, *numbers)
    kept = [x.detach() for x in (grad, *leaves, bits, out, lse)]
    problems = []
    for one, args in (
        (operators.selected_bits, (ranges, cfg.l_sel)),
        (operators.selected, (*leaves, bits, *numbers)),
        (operators.selected_backward, (*kept, *numbers)),
    ):
        said = torch.library.opcheck(one, args, raise_exception=False)
        problems += [f"{name}: {text}" for name, text in said.items() if text != "SUCCESS"]

    def call(*given: Tensor) -> Tensor:
        return operators.attend_selected(*given, ranges, cfg)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    pairs = []
    for run in (call, compiled):
        result = run(*leaves)
        pairs.append([result, *torch.autograd.grad(result, leaves, grad)])
    return problems + ["compiled"] * any(not torch.equal(a, b) for a, b in zip(*pairs, strict=True))


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
        for ran in (counts.in_selected["selected"], counts.in_window["window"]):
            if (ran > 0) != wanted:
                problems.append(f"{asked}: {counts.in_selected}, {counts.in_window}")
    if abs(float((losses[0] - losses[1]).detach())) > 1e-5:
        problems.append(f"the losses differ: {losses}")
    for module in (launch, window_launch):
        right = module.forward
        wrong = lambda *x, of=right: (of(*x)[0] * 1.01, of(*x)[1])  # noqa: E731
        with mock.patch.object(module, "forward", wrong):
            found = self_test(engine).describe()["paths"]
        choices = [engine.dispatch.selected(plan.toggles), engine.dispatch.window(plan.toggles)]
        barred = all("the self-test rejected triton" in one.reason for one in choices)
        # Nothing of this package is used then, and what takes its place was tested too.
        if found["triton"]["agrees"] or not barred or len(found) != 2:
            problems.append(f"a wrong kernel is chosen: {choices}, {found}")
    return problems


def lists() -> list[str]:
    """Each block's readers in each run, ascending, and how they are cut."""
    return list_problems() + offset_problems()


def far_apart(module: object = launch, run: int = 0) -> list[str]:
    """Offsets beyond 32 bits: keys and queries that lie 2^27 numbers apart in a file with holes."""
    case = Case(seq_len=40, heads=1, dtype=torch.float16, d_k=16, d_v=16, run=run)
    given, blocks = case_inputs(case), selection(case)
    far = []
    with tempfile.TemporaryDirectory() as folder:
        for number, x in enumerate(given[:3]):
            size = 40 << 27
            path = Path(folder) / f"{number}"
            with path.open("wb") as file:
                file.truncate(2 * size)
            flat = torch.from_file(str(path), shared=True, size=size, dtype=torch.float16)
            wide = flat.as_strided(x.shape, [0, 1 << 27, *([16] * (x.dim() - 3)), 1])
            far.append(wide.copy_(x))
        mine = found_by(module, case, [*far, given[3]], blocks)  # type: ignore[arg-type]
    near = found_by(launch, case, given, blocks)
    return [f"{name} differs" for name in near if not torch.equal(near[name], mine[name])]


def far_apart_by_block() -> list[str]:
    """The same where blocks own the work."""
    return far_apart(run=24)


def far_apart_in_32_bits() -> list[str]:
    """The same with the planted defect; where it does not die of a wild address, it is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        defect = ("rows.py", "far = token.to(tl.int64)", "far = token")
        return far_apart(planted(Path(folder), "in_32_bits", *defect))


def mutant(name: str) -> list[str]:
    """What is seen of a planted defect."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        copy = planted(Path(folder), name, *MUTANTS[name])
        if name in defects("selected_lists"):
            return list_problems(copy)
        return core(copy, BY_BLOCK if name in defects("selected_by_block") else CORE)


PROOFS: dict[str, Callable[[], list[str]]] = {
    one.__name__: one
    for one in (
        values, tuned, tiles, space, whole, same_bits, repeats, lists, operator, trainer,
        far_apart, far_apart_by_block, far_apart_in_32_bits,
    )
} | {name: partial(mutant, name) for name in MUTANTS}  # fmt: skip


if __name__ == "__main__":
    for wanted in sys.argv[1:]:
        print(json.dumps({wanted: PROOFS[wanted]()}), flush=True)
