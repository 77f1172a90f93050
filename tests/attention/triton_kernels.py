"""How Triton kernels are judged: by their numbers, and by which program writes which number.

Runs where Triton's interpreter does (TRITON_INTERPRET=1 before triton is imported). A judge takes
the launching module as an argument, so that a copy with a planted defect is judged like it.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from triton.runtime import interpreter

from nsa.attention import triton
from nsa.attention.triton import core as LAUNCH
from tests.attention.defects import defects

_PACKAGE = Path(triton.__file__).parent


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
    with mock.patch.dict(
        launch.launch.CHOOSERS, {name: lambda *_, cut=cut: cut for name, cut in cuts.items()}
    ):
        yield


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
    for source in _PACKAGE.rglob("*.py"):
        within = source.relative_to(_PACKAGE)
        text = source.read_text().replace("nsa.attention.triton", name)
        if within.as_posix() == path:
            text = text.replace(old, new)
        (copy / within).parent.mkdir(parents=True, exist_ok=True)
        (copy / within).write_text(text)
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return importlib.import_module(f"{name}.core")


def judged(judge: Callable[[ModuleType], list[str]], kind: str, name: str) -> list[str]:
    """What `judge` sees of a planted defect; where it dies of a wild address, it says nothing."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        copy = f"{kind}_{name}"  # two of other kernels may have one name
        return judge(planted(Path(folder), copy, *defects(kind)[name]))


def differing(
    call: Callable[[ModuleType, list[Tensor]], dict[str, Tensor]],
    launch: ModuleType,
    tensors: list[Tensor],
    steps: Sequence[int],
) -> list[str]:
    """What `launch` gives otherwise than the package's own, of tensors that lie far apart.

    steps: so many numbers between neighboring tokens of the first tensors, in files with holes.
    """
    with tempfile.TemporaryDirectory() as folder:
        far = list(tensors)
        for number, step in enumerate(steps):
            x, path = tensors[number], Path(folder) / f"{number}"
            size = x.shape[1] * step
            with path.open("wb") as file:
                file.truncate(x.element_size() * size)
            flat = torch.from_file(str(path), shared=True, size=size, dtype=x.dtype)
            inner = [step, *[16] * (x.dim() - 3)]
            far[number] = flat.as_strided(x.shape, [0, *inner, 1]).copy_(x)
        found = call(launch, far)
    near = call(LAUNCH, tensors)
    return [f"{name} differs" for name in near if not torch.equal(near[name], found[name])]
