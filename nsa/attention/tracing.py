"""Named ranges for the profiler, and for NVTX where it is switched on.

The names are part of the public contract: `nsa.cmp`, `nsa.sel.scores`, `nsa.sel.ranges_v1`,
`nsa.sel.ranges_v2`, `nsa.sel.attend`, `nsa.win`, `nsa.gate`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from nsa.contract import ATTEND_RANGE, SELECTION_RANGES, WIN_RANGE


class OperatorCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that torch really runs meanwhile, by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note the operator and run it."""
        self.names[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, kw_only=True)
class RangeCounts:
    """How often each range was entered, and in some of them which operators ran, by name.

    A range is a name that code gives itself; the operators are what ran.
    """

    entered: Counter[str] = field(default_factory=Counter)
    inside: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))


_COUNTED = frozenset((*SELECTION_RANGES.values(), WIN_RANGE, ATTEND_RANGE))
_nvtx_enabled = False
_counts: RangeCounts | None = None


def enable_nvtx(on: bool) -> None:
    """Emit NVTX ranges beside the profiler's from now on (needs CUDA to have an effect)."""
    global _nvtx_enabled
    _nvtx_enabled = on


def is_watched(modules: Iterable[nn.Module]) -> bool:
    """Does somebody count ranges, operators, or calls of one of these modules now?

    A graph that is compiled or recorded would show nothing of them.
    """
    return (
        _counts is not None
        or bool(torch._C._len_torch_dispatch_stack())
        or any(_hooks(module) for module in modules)
    )


def _hooks(module: nn.Module) -> bool:
    before, after = module._forward_pre_hooks, module._forward_hooks
    return bool(before or after or module._backward_pre_hooks or module._backward_hooks)


@contextmanager
def count_ranges() -> Iterator[RangeCounts]:
    """Count the ranges entered meanwhile: proof of which code ran, without a profiler."""
    global _counts
    _counts = counts = RangeCounts()
    try:
        yield counts
    finally:
        _counts = None


@contextmanager
def profile_range(name: str) -> Iterator[None]:
    """Mark the enclosed work as `name` for torch.profiler, and for NVTX where enabled.

    A graph that is compiled has no ranges.
    """
    if torch.compiler.is_compiling():
        yield
        return
    counts = _counts
    # A mark that nobody reads takes longer than a small operator.
    if counts is None and not _nvtx_enabled and not torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        yield
        return
    operators = OperatorCount() if counts is not None and name in _COUNTED else None
    if counts is not None:
        counts.entered[name] += 1
    nvtx = _nvtx_enabled and torch.cuda.is_available()
    if nvtx:
        torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
    try:
        with torch.profiler.record_function(name), operators or nullcontext():
            yield
    finally:
        if counts is not None and operators is not None:
            counts.inside[name].update(operators.names)
        if nvtx:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
