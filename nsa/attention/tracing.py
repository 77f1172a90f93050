"""What torch and those who watch see of attention: operators of its own, and named ranges.

A compiler does not look into an operator: what runs in it is what runs without a compiler. Its
arguments are tensors, numbers and text, so a config is told as text. Ranges are for the profiler,
and for NVTX where it is switched on. Their names are part of the public contract: `nsa.cmp`,
`nsa.sel.scores`, `nsa.sel.ranges_v1`, `nsa.sel.ranges_v2`, `nsa.sel.attend`, `nsa.win`, `nsa.gate`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from nsa.config import NSAConfig
from nsa.contract import ATTEND_RANGE, SELECTION_RANGES, WIN_RANGE

Gradients = Callable[..., Sequence[Tensor]]
Function = TypeVar("Function", bound=Callable[..., Any])


def operator(fake: Callable[..., Any]) -> Callable[[Function], Function]:
    """Register a function under its name. fake: its results for tensors that hold no numbers."""

    def register(function: Function) -> Function:
        made = torch.library.custom_op(f"nsa::{function.__name__}", function, mutates_args=())
        made.register_fake(fake)
        return cast("Function", made)

    return register


_FIELDS = [one.name for one in fields(NSAConfig)]


def told(cfg: NSAConfig) -> str:
    """A config as operators take it, made in a way that a compiler can follow."""
    return " ".join([str(getattr(cfg, name)) for name in _FIELDS])


@cache
def config_of(text: str) -> NSAConfig:
    """The config that an operator was told."""
    values = (int(word) if word.isdigit() else word for word in text.split())
    return NSAConfig(**dict[str, Any](zip(_FIELDS, values, strict=True)))


def differentiate(operator: Any, gradients: Gradients, *, results: int, first: int = 0) -> None:
    """Tell autograd how an operator (tensors, config) -> (output, lse, ...) derives.

    `gradients` of (gradient of the output, the operator's tensors, so many of its first results,
    from number `first` on, the config) are those of its first tensors; nothing else has one.
    """

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.cfg = inputs
        ctx.save_for_backward(*tensors, *output[first:results])
        ctx.n_inputs = len(inputs)
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        found = () if grad is None else gradients(grad, *ctx.saved_tensors, ctx.cfg)
        return (*found, *(None,) * (ctx.n_inputs - len(found)))

    operator.register_autograd(backward, setup_context=keep)


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
