"""What the Triton kernels compute, held against float64, and which program writes which number.

Runs where Triton's interpreter does (TRITON_INTERPRET=1 before triton is imported). A branch is
judged by itself where the gates let through nothing else (`alone`). What judges takes the launching
module as an argument, so that a copy with a planted defect is judged like it.
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
from nsa.attention.selection import block_bits, ranges_v1
from nsa.attention.triton.core import launch as LAUNCH
from nsa.attention.triton.selected_tiles import ByBlock, Cut
from nsa.attention.triton.tiles import Tile, room_for_bits
from tests.attention.defects import defects

BOUND = {torch.float32: 1e-5, torch.float16: 5 * 2.0**-11}
_PACKAGE = Path(LAUNCH.__file__).parents[1]


def config_of(case: Any, **numbers: Any) -> nsa.NSAConfig:
    """The package's config for a shape: its heads, groups and widths, and these numbers."""
    return nsa.NSAConfig(
        dim=8, n_heads=case.heads * case.groups, n_kv_groups=case.groups, d_k=case.d_k,
        d_v=case.d_v, **numbers,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """A shape, and how its work is cut; rows, every, piece: of tiles.Cut.

    run: positions that blocks own at a time; with 0 queries walk.
    """

    seq_len: int
    heads: int
    groups: int = 1
    batch: int = 1
    d_k: int = 16
    d_v: int = 16
    l_sel: int = 8
    n_sel: int = 4
    dtype: torch.dtype = torch.float32
    rows: int = 64
    every: bool = True
    piece: int = 16
    run: int = 0

    def config(self) -> nsa.NSAConfig:
        """The package's config for it; no compression block is complete."""
        longer = self.seq_len // self.l_sel * self.l_sel + self.l_sel
        return config_of(
            self, l=longer, d=self.l_sel, l_sel=self.l_sel, n_sel=self.n_sel, w=1
        )  # fmt: skip

    def cut(self) -> Cut:
        """As asked, whatever the cost model would say."""
        tile, n_blocks = Tile(rows=self.rows, warps=1, stages=1), self.config().n_blocks
        return Cut(
            forward=tile, query_gradient=tile, key_gradient=tile, every=self.every,
            piece=self.piece, n_blocks=n_blocks(self.seq_len),
            readers=self.seq_len * min(self.n_sel, n_blocks(self.seq_len)),
            by_block=self.by_block() if self.run else None,
        )  # fmt: skip

    def by_block(self) -> ByBlock:
        """The form in which blocks own the work."""
        tile, n_blocks = Tile(rows=self.rows, warps=1, stages=1), self.config().n_blocks
        places = min(self.n_sel, n_blocks(self.seq_len))
        return ByBlock(
            forward=tile, query_gradient=tile, merge=tile, tokens=self.run, places=places,
            piece=self.piece, n_blocks=n_blocks(self.seq_len),
        )  # fmt: skip


# Between them: both walks, tiles of one token and of many, heads that fill no tile, more than one
# word of bits, pieces that end inside a list, a last block that is cut, S below one block.
CORE = (
    Case(seq_len=5, heads=1, batch=2, l_sel=8, d_k=3, d_v=5, rows=16, every=False),
    Case(seq_len=71, heads=3, groups=2, l_sel=2, n_sel=5, d_k=24, d_v=8, rows=128),
    Case(seq_len=71, heads=3, l_sel=2, n_sel=4, rows=16, every=False, piece=32),
    # Blocks own the work: runs that end inside a block, and a second word of bits.
    Case(seq_len=21, heads=3, groups=2, l_sel=4, n_sel=3, d_k=24, d_v=8, rows=32, run=14),
    Case(seq_len=40, heads=1, l_sel=1, rows=32, run=28, piece=64),
)
# Which of them are of that form.
BY_BLOCK = CORE[3:]


def selection(case: Case) -> Tensor:
    """Blocks [B,S,G,n] by the rules, the free ones at random; token 3 reads nothing at all."""
    rng = np.random.default_rng(case.seq_len)
    shape = (case.batch, case.seq_len, case.groups, case.n_sel)
    blocks = np.full(shape, -1, dtype=np.int64)
    for b, t, g in np.ndindex(*shape[:3]):
        current = t // case.l_sel
        taken = {0, current, max(0, current - 1)}
        free = [j for j in range(current + 1) if j not in taken]
        room = min(case.n_sel - len(taken), len(free))
        taken |= set(rng.choice(free, room, replace=False).tolist()) if room > 0 else set()
        blocks[b, t, g, : len(taken)] = sorted(taken)
    blocks[:, 3] = -1
    return torch.from_numpy(blocks)


def inputs(case: Any) -> list[Tensor]:
    """q [B,S,G,h,Dk], k, v [B,S,G,D] and a gradient of the output; not laid out contiguously.

    `case` is one of any branch that has a value for each token.
    """
    generator = torch.Generator().manual_seed(case.seq_len)

    def normal(*shape: int) -> Tensor:
        wide = torch.randn(case.batch, case.seq_len, *shape[:-1], shape[-1] + 3,
                           generator=generator)  # fmt: skip
        return wide.to(case.dtype)[..., 1:-2]

    g, h = case.groups, case.heads
    return [
        normal(g, h, case.d_k),
        normal(g, case.d_k),
        normal(g, case.d_v),
        normal(g, h, case.d_v),
    ]


def right(case: Case, tensors: list[Tensor], blocks: Tensor) -> dict[str, Tensor]:
    """Everything in float64 with masks written out; lse to the base 2 [B,G,S,h]."""
    q, k, v = leaves = [x.double().requires_grad_() for x in tensors[:3]]
    token = torch.arange(case.seq_len)
    reads = (blocks[..., None] == token // case.l_sel).any(-2).transpose(1, 2)
    reads = reads & (token <= token[:, None])
    scores = torch.einsum("bsghd,btgd->bgsht", q, k) * case.d_k**-0.5
    scores = scores.masked_fill(~reads[:, :, :, None], float("-inf"))
    nothing = ~reads.any(-1)[..., None, None]
    p = scores.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)
    out = torch.einsum("bgsht,btgd->bsghd", p, v)
    grads = torch.autograd.grad(out, leaves, tensors[3].double())
    lse = scores.detach().logsumexp(-1) * np.log2(np.e)
    return {"out": out.detach(), "lse": lse, **dict(zip(("dq", "dk", "dv"), grads, strict=True))}


def found_by(launch: ModuleType, case: Case, tensors: list[Tensor], blocks: Tensor) -> Any:
    """The same by the kernels."""
    cfg = case.config()
    with cut_as(launch, selected=case.cut()):
        bits = block_bits(ranges_v1(blocks, cfg), cfg)
        return alone(launch, 1, cfg, tensors, bits)


def core(launch: ModuleType = LAUNCH, cases: tuple[Case, ...] = CORE) -> list[str]:
    """What the kernels of `launch` compute wrongly, write twice, or leave unwritten."""
    problems: list[str] = []
    for case in cases:
        tensors, blocks = inputs(case), selection(case)
        with written_once(problems), poisoned():
            mine = found_by(launch, case, tensors, blocks)
        for name, truth in right(case, tensors, blocks).items():
            problems += compare(f"{name} of {case}", mine[name].double(), truth, BOUND[case.dtype])
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
    """The branches of calls by a `core.launch` are cut so, whatever a device would like."""
    choosers = launch.cut_of.__globals__["CHOOSERS"]
    with mock.patch.dict(choosers, {name: lambda *_, cut=cut: cut for name, cut in cuts.items()}):
        yield


def by_core(
    launch: ModuleType, cfg: nsa.NSAConfig, given: Sequence[Tensor], grad: Tensor,
    bits: Tensor | None = None,
) -> dict[str, Any]:  # fmt: skip
    """What a `core.launch` makes of the eight tensors, q [B,S,G,h,Dk] first, by name.

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
    """`core.launch` of a copy of the kernels' package in which `old` is `new`, named `name`."""
    copy = folder / name
    seen = 0
    for source in _PACKAGE.rglob("*.py"):
        within = source.relative_to(_PACKAGE)
        text = source.read_text().replace("nsa.attention.triton.", f"{name}.")
        if within.as_posix() == path:
            seen = text.count(old)
            text = text.replace(old, new)
        (copy / within).parent.mkdir(parents=True, exist_ok=True)
        (copy / within).write_text(text)
    if not seen:
        raise ValueError(f"{name}: {path} has no such text: {old!r}")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return importlib.import_module(f"{name}.core.launch")


def judged(judge: Callable[[ModuleType], list[str]], kind: str, name: str) -> list[str]:
    """What `judge` sees of a planted defect; where it dies of a wild address, it says nothing."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        copy = f"{kind}_{name}"  # two of other kernels may have one name
        return judge(planted(Path(folder), copy, *defects(kind)[name]))


def drawn(max_examples: int) -> settings:
    """So many examples, the same every time."""
    return settings(
        max_examples=max_examples, derandomize=True, database=None, deadline=None,
        phases=(Phase.generate,), suppress_health_check=list(HealthCheck),
    )  # fmt: skip


# Small shapes of a case that has a window, as strategies.
SHAPES: dict[str, Any] = {
    "seq_len": st.integers(1, 40), "w": st.integers(1, 50), "heads": st.integers(1, 16),
    "groups": st.integers(1, 2), "batch": st.integers(1, 2), "d_k": st.integers(1, 33),
    "d_v": st.integers(1, 33), "dtype": st.sampled_from((torch.float32, torch.float16)),
}  # fmt: skip


def over_drawn(
    cases: st.SearchStrategy[Any], judge: Callable[[Any], list[str]], *, examples: int
) -> list[str]:
    """What `judge` finds in so many cases."""
    problems: list[str] = []

    @drawn(examples)
    @given(cases)
    def run(case: Any) -> None:
        problems.extend(judge(case))

    run()
    return problems


@contextmanager
def far_apart(
    tensors: Sequence[Tensor], apart: Sequence[int], dim: int = 1
) -> Iterator[list[Tensor]]:
    """Copies whose neighbors in `dim` lie so many numbers apart, in files with holes."""
    with tempfile.TemporaryDirectory() as folder:
        far = []
        for number, (x, step) in enumerate(zip(tensors, apart, strict=True)):
            path, size = Path(folder) / f"{number}", x.shape[dim] * step
            with path.open("wb") as file:
                file.truncate(x.element_size() * size)
            flat = torch.from_file(str(path), shared=True, size=size, dtype=x.dtype)
            inner = [step if at == dim else 16 for at in range(1, x.dim() - 1)]
            far.append(flat.as_strided(x.shape, [0, *inner, 1]).copy_(x))
        yield far


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
