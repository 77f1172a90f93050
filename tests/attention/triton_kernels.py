"""How Triton kernels are judged: against float64, and by which program writes which number.

Runs where Triton's interpreter does (TRITON_INTERPRET=1 before triton is imported). A judge takes
the launching module as an argument, so that a copy with a planted defect is judged like it. A
branch is judged by itself where the gates let through nothing else (`alone`).
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime import interpreter

import nsa
from nsa.attention import triton
from nsa.attention.triton import core as LAUNCH
from nsa.attention.triton.tiles import room_for_bits
from tests.attention.defects import defects

BOUND = {torch.float32: 1e-5, torch.float16: 5 * 2.0**-11}
_PACKAGE = Path(triton.__file__).parent


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of a branch or of all; what is derived from it adds the numbers of its config."""

    seq_len: int
    heads: int = 1
    groups: int = 1
    batch: int = 1
    d_k: int = 16
    d_v: int = 16
    dtype: torch.dtype = torch.float32

    def config(self) -> nsa.NSAConfig:
        """The package's config for it."""
        names = (n for n in ("l", "d", "l_sel", "n_sel", "w", "phi") if hasattr(self, n))
        return nsa.NSAConfig(
            dim=8, n_heads=self.heads * self.groups, n_kv_groups=self.groups, d_k=self.d_k,
            d_v=self.d_v, **{name: getattr(self, name) for name in names},
        )  # fmt: skip


def inputs(case: Any) -> list[Tensor]:
    """q [B,S,G,h,Dk], k, v [B,S,G,D] and a gradient of the output; not laid out contiguously.

    `case` is one of any branch that has a value for each token, or makes its own.
    """
    if hasattr(case, "tensors"):
        made: list[Tensor] = case.tensors()
        return made
    draw = torch.Generator().manual_seed(case.seq_len)
    g, h = case.groups, case.heads
    shapes = ((g, h, case.d_k), (g, case.d_k), (g, case.d_v), (g, h, case.d_v))
    return [apart(case.batch, case.seq_len, *shape, by=draw).to(case.dtype) for shape in shapes]


def apart(*shape: int, by: torch.Generator) -> Tensor:
    """Random numbers that are not laid out contiguously."""
    return torch.randn(*shape[:-1], shape[-1] + 3, generator=by)[..., 1:-2]


def branch(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Output [B,S,G,h,Dv] and log-sum-exp to the base 2 [B,G,S,h], with the mask written out.

    seen: what fits [B,G,S,h,T]. Where nothing is seen the output is 0.
    """
    scores = torch.einsum("bsghd,btgd->bgsht", q, k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~seen, -torch.inf)
    out = torch.einsum("bgsht,btgd->bsghd", torch.nan_to_num(scores.softmax(-1)), v)
    return out, scores.detach().logsumexp(-1) * np.log2(np.e)


def with_gradients(
    case: Shape, tensors: list[Tensor], attend: Callable[..., tuple[Tensor, Tensor]]
) -> dict[str, Tensor]:
    """Output, sums and gradients of a branch in float64: by q, k, v and the output's gradient."""
    leaves = [x.double().requires_grad_() for x in tensors[:3]]
    out, lse = attend(*leaves)
    grads = torch.autograd.grad(out, leaves, tensors[3].double())
    return {"out": out.detach(), "lse": lse, **dict(zip(("dq", "dk", "dv"), grads, strict=True))}


def of_blocks(blocks: Tensor, l_sel: int) -> Tensor:
    """What tokens read of blocks [B,S,G,n]: [B,G,S,1,S]."""
    token = torch.arange(blocks.shape[1])
    reads = (blocks[..., None] == token // l_sel).any(-2).transpose(1, 2)
    return (reads & (token <= token[:, None]))[:, :, :, None]


def held(
    launch: ModuleType,
    cases: Sequence[Any],
    found_by: Callable[[ModuleType, Any, list[Tensor]], dict[str, Tensor]],
    right: Callable[[Any], dict[str, Tensor]],
    *,
    exact: Sequence[str] = (),
    of_one: bool = False,
) -> list[str]:
    """What `launch` computes wrongly, writes twice or leaves unwritten, of the first such case.

    exact: what is as exact as float32 whatever the type. of_one: a gradient that is 0 everywhere,
    as a softmax over one key has it, is held against 1.
    """
    problems: list[str] = []
    for case in cases:
        with written_once(problems), poisoned():
            mine = found_by(launch, case, inputs(case))
        for name, truth in right(case).items():
            base = 1.0 if of_one and truth.abs().max() < 1e-12 else 0.0
            bound = BOUND[torch.float32 if name in exact else case.dtype]
            problems += compare(
                f"{name} of {case}", mine[name].double() + base, truth + base, bound
            )
        if problems:
            break
    return problems


def compare(what: str, mine: Tensor, truth: Tensor, bound: float) -> list[str]:
    """Largest error as a share of the largest value; what is infinite, or all 0, has to be so."""
    finite = truth.isfinite()
    if not torch.equal(mine[~finite], truth[~finite]):
        return [f"{what}: infinite elsewhere"]
    if not finite.any():
        return []
    error = (mine[finite] - truth[finite]).abs().max() / truth[finite].abs().max().clamp_min(1e-30)
    return [] if error <= bound else [f"{what}: off by {float(error):.2g}"]


@contextmanager
def cut_as(launch: ModuleType, **cuts: Any) -> Iterator[None]:
    """The branches of calls by a `core` are cut so, whatever a device would like."""
    choosers = launch.cut_of.__globals__["CHOOSERS"]
    with mock.patch.dict(choosers, {name: lambda *_, cut=cut: cut for name, cut in cuts.items()}):
        yield


def by_core(
    launch: ModuleType, cfg: nsa.NSAConfig, given: Sequence[Tensor], grad: Tensor,
    bits: Tensor | None = None,
) -> dict[str, Any]:  # fmt: skip
    """What a `core` makes of the eight tensors, q [B,S,G,h,Dk] first, by name.

    bits: of blocks that are read in the place of those that are chosen.
    """
    q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates = given
    win, win_lse, terms, values = launch.window_and_terms(q, k_win, v_win, k_cmp, v_cmp, cfg)
    cmp, cmp_lse, exact_lse = launch.compressed.attend(q, terms, values, cfg)
    blocks = None
    if bits is None:
        blocks, bits = launch.compressed.top_blocks(q, terms, exact_lse, cfg)
    out, sel, sel_lse = launch.selected.forward_mixed(q, k_sel, v_sel, bits, cmp, win, gates, cfg)
    kept = (bits, terms, values, cmp, cmp_lse, win, win_lse, sel, sel_lse)
    made = {"branches": (cmp, sel, win), "lse": (cmp_lse, sel_lse, win_lse), "out": out}
    made |= {"blocks": blocks, "bits": bits, "terms": terms, "exact_lse": exact_lse}
    return made | {"grads": launch.backward(grad, given, kept, cfg)}


def alone(
    launch: ModuleType, branch: int, cfg: nsa.NSAConfig, tensors: Sequence[Tensor],
    bits: Tensor | None = None,
) -> dict[str, Any]:  # fmt: skip
    """What one branch, 0 to 2, gives of q, k, v and a gradient of its output [B,S,G,h,Dv].

    It has the one gate that is open. bits: what the selected branch reads, of nothing where None.
    """
    q, k, v, grad = tensors
    batch, seq_len, groups, heads = q.shape[:4]
    if bits is None:
        bits = room_for_bits(q, cfg.l_sel).zero_()
    pair = [torch.zeros(batch, seq_len, groups, d, dtype=q.dtype) for d in (cfg.d_k, cfg.d_v)]
    keys = [*pair, *pair, *pair]
    keys[2 * branch : 2 * branch + 2] = [k, v]
    gates = torch.zeros(batch, seq_len, groups * heads, 3, dtype=q.dtype)
    gates[..., branch] = 1.0
    made = by_core(launch, cfg, [q, *keys, gates], grad.flatten(2, 3), bits)
    shape = (batch, groups, seq_len, heads)
    found = {"out": made["branches"][branch], "lse": made["lse"][branch].view(shape)}
    of_keys = made["grads"][1 + 2 * branch : 3 + 2 * branch]
    found |= dict(zip(("dq", "dk", "dv"), (made["grads"][0], *of_keys), strict=True))
    return found | {"exact_lse": made["exact_lse"].view(shape), "terms": made["terms"]}


@contextmanager
def poisoned() -> Iterator[None]:
    """Fresh memory holds NaN, or -1: what no program writes shows."""
    empty, like = torch.empty, torch.empty_like

    def fill(x: Tensor) -> Tensor:
        return x.fill_(float("nan") if x.is_floating_point() else -1)

    with (
        mock.patch.object(torch, "empty", lambda *a, **k: fill(empty(*a, **k))),
        mock.patch.object(torch, "empty_like", lambda *a, **k: fill(like(*a, **k))),
    ):
        yield


@contextmanager
def written_once(problems: list[str]) -> Iterator[None]:
    """Note each address that two programs of one launch write: a race on a device."""
    builder, run = interpreter.interpreter_builder, interpreter.GridExecutor.__call__
    store = type(builder).create_masked_store
    writers: dict[int, set[tuple[int, ...]]] = defaultdict(set)

    def noted(self: Any, ptrs: Any, value: Any, mask: Any, *more: Any) -> Any:
        for address in np.unique(ptrs.data[mask.data.astype(bool)]):
            writers[int(address)].add(tuple(self.grid_idx))
        return store(self, ptrs, value, mask, *more)

    def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
        writers.clear()
        result = run(self, *args, **kwargs)
        twice = sum(len(programs) > 1 for programs in writers.values())
        if twice:
            problems.append(f"{twice} numbers have more than one writer in one launch")
        return result

    with (
        mock.patch.object(type(builder), "create_masked_store", noted),
        mock.patch.object(interpreter.GridExecutor, "__call__", launched),
    ):
        yield


def planted(folder: Path, name: str, path: str, old: str, new: str) -> ModuleType:
    """`core` of a copy of the kernels' package in which `old` is `new`, named `name`."""
    copy = folder / name
    seen = 0
    for source in _PACKAGE.rglob("*.py"):
        within = source.relative_to(_PACKAGE)
        text = source.read_text().replace("nsa.attention.triton", name)
        if within.as_posix() == path:
            seen = text.count(old)
            text = text.replace(old, new)
        (copy / within).parent.mkdir(parents=True, exist_ok=True)
        (copy / within).write_text(text)
    if not seen:
        raise ValueError(f"{name}: {path} has no such text: {old!r}")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return importlib.import_module(f"{name}.core")


def judged(judge: Callable[[ModuleType], list[str]], kind: str, name: str) -> list[str]:
    """What `judge` sees of a planted defect; where it dies of a wild address, it says nothing."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        copy = f"{kind}_{name}"  # two of other kernels may have one name
        return judge(planted(Path(folder), copy, *defects(kind)[name]))


# Small shapes of a case that has a window, as strategies.
SHAPES: dict[str, Any] = {
    "seq_len": st.integers(1, 40), "w": st.integers(1, 50), "heads": st.integers(1, 16),
    "groups": st.integers(1, 2), "batch": st.integers(1, 2), "d_k": st.integers(1, 33),
    "d_v": st.integers(1, 33), "dtype": st.sampled_from((torch.float32, torch.float16)),
}  # fmt: skip


def over_drawn(
    cases: st.SearchStrategy[Any], judge: Callable[[Any], list[str]], *, examples: int
) -> list[str]:
    """What `judge` finds in so many cases, the same every time."""
    problems: list[str] = []

    @settings(
        max_examples=examples, derandomize=True, database=None, deadline=None,
        phases=(Phase.generate,), suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(cases)
    def run(case: Any) -> None:
        problems.extend(judge(case))

    run()
    return problems


def far_problems(
    call: Callable[[ModuleType, list[Tensor]], dict[str, Tensor]],
    launch: ModuleType,
    tensors: list[Tensor],
    steps: Sequence[int],
    dim: int = 1,
) -> list[str]:
    """What `launch` gives otherwise than the package's own, of tensors that lie far apart.

    steps: so many numbers between neighbors in `dim` of the first tensors, in files with holes; 0:
    as it is.
    """
    with tempfile.TemporaryDirectory() as folder:
        far = list(tensors)
        for number, step in enumerate(steps):
            if not step:
                continue
            x, path = tensors[number], Path(folder) / f"{number}"
            size = x.shape[dim] * step
            with path.open("wb") as file:
                file.truncate(x.element_size() * size)
            flat = torch.from_file(str(path), shared=True, size=size, dtype=x.dtype)
            inner = [step if at == dim else 16 for at in range(1, x.dim() - 1)]
            far[number] = flat.as_strided(x.shape, [0, *inner, 1]).copy_(x)
        found = call(launch, far)
    near = call(LAUNCH, tensors)
    return [f"{name} differs" for name in near if not torch.equal(near[name], found[name])]


def proofs_of(
    proofs: Sequence[Callable[..., list[str]]],
    judges: dict[str, Callable[[ModuleType], list[str]]],
) -> dict[str, Callable[[], list[str]]]:
    """Proofs by their names, and planted defects, each kind of which has its judge."""
    planted = {
        name: partial(judged, judge, kind, name)
        for kind, judge in judges.items()
        for name in defects(kind)
    }
    return {one.__name__: one for one in proofs} | planted


def checked(
    call: Callable[..., Any], tensors: Sequence[Tensor], grad: Tensor, *operators: tuple[Any, ...]
) -> list[str]:
    """opcheck of `operators`, (operator, arguments, tests or None), and one graph, both ways."""
    problems = []
    for one, args, *tests in operators:
        more = {"test_utils": tests[0]} if tests else {}
        said = torch.library.opcheck(one, args, raise_exception=False, **more)
        problems += [f"{name}: {text}" for name, text in said.items() if text != "SUCCESS"]
    pairs = []
    for run in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        result = run(*tensors)
        every = result if isinstance(result, tuple) else (result,)
        pairs.append([*every, *torch.autograd.grad(every[0], tensors, grad)])
    return problems + ["compiled"] * any(not torch.equal(a, b) for a, b in zip(*pairs, strict=True))
