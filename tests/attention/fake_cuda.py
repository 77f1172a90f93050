"""A CUDA device that is not there: the step's operators, memory and synchronizations without a GPU.

`FakeTensorMode` runs operators on shapes, types and devices only. A build of torch without CUDA
lacks three things that it needs, and they are lent to it here for the length of a `with`: a device
guard, the choice among the kernels of scaled dot product attention, and autograd's engine, which
insists on a real accelerator. `walk_back` goes through the same graph in the same order; that it
runs the same operators as the engine is a test.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import BackwardCFunction
from torch.library import Library
from torch.utils._python_dispatch import TorchDispatchMode

_CUDA, _META = 1, 14  # c10::DeviceType
_SLOTS = 32  # virtual functions of c10's DeviceGuardImplInterface, and some more
_DEVICE = ctypes.c_uint16  # c10::Device: type in the low byte, index in the high one
# Bookkeeping that reaches the device never, or an alias without the annotation of one.
_FREE = ("prim::", "profiler::")
_ALIASES = {"aten::_unsafe_view"}
_UNFUSED = ("_fused_rms_norm", "_fused_rms_norm_backward", "silu_backward")


@contextmanager
def _guard() -> Iterator[None]:
    """Register a device guard that does nothing, where the build of torch has none for CUDA.

    It is the guard of the meta device with three functions replaced: type, exchangeDevice and
    getDevice, the first three of the interface.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    name = "_ZN3c104impl26device_guard_impl_registryE"
    registry = (ctypes.c_void_p * (_META + 1)).in_dll(library, name)
    if registry[_CUDA]:
        yield
        return
    functions = [
        ctypes.CFUNCTYPE(ctypes.c_int8, ctypes.c_void_p)(lambda _: _CUDA),
        ctypes.CFUNCTYPE(_DEVICE, ctypes.c_void_p, _DEVICE)(lambda _, __: _CUDA),
        ctypes.CFUNCTYPE(_DEVICE, ctypes.c_void_p)(lambda _: _CUDA),
    ]
    # Two words before the functions belong to a table of them: the offset to the top and the type.
    first = ctypes.c_void_p.from_address(registry[_META] or 0).value or 0
    table = (ctypes.c_void_p * (_SLOTS + 2)).from_buffer_copy(
        (ctypes.c_void_p * (_SLOTS + 2)).from_address(first - 16)
    )
    for slot, function in enumerate(functions):
        table[2 + slot] = ctypes.cast(function, ctypes.c_void_p).value
    guard = ctypes.c_void_p(ctypes.addressof(table) + 16)
    registry[_CUDA] = ctypes.addressof(guard)
    try:
        yield
    finally:
        registry[_CUDA] = None


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Scaled dot product attention as a build with CUDA spells it: flash, or masks by efficient."""
    ops = torch.ops.aten
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        zero = torch.zeros((), dtype=q.dtype, device=q.device)
        attn_mask = torch.where(attn_mask, zero, zero - torch.inf)
    if attn_mask is None and q.dtype.itemsize == 2:
        return ops._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, False, scale=scale)[
            0
        ]
    if enable_gqa:
        raise NotImplementedError("the memory-efficient kernel has no grouped queries")
    grads = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*q.shape[:3], k.shape[2])
    return ops._scaled_dot_product_efficient_attention(
        q, k, v, attn_mask, grads, dropout_p, is_causal, scale=scale
    )[0]


def _never(*_: object) -> None:
    raise AssertionError("a kernel ran on a device that is not there")


@contextmanager
def fake_cuda() -> Iterator[FakeTensorMode]:
    """Everything inside runs on fake tensors, on "cuda" too; `Tensor.backward` is `walk_back`."""
    with ExitStack() as stack:
        stack.enter_context(_guard())
        if not torch.cuda.is_available():
            library = Library("aten", "IMPL")
            stack.callback(library._destroy)
            # Where a kernel of its own exists, autograd does not take the operator apart.
            for name in filter(partial(hasattr, torch.ops.aten), _UNFUSED):
                library.impl(name, _never, "CUDA")
            for key in ("CUDA", "AutogradCUDA"):
                library.impl("scaled_dot_product_attention", _attend, key)
        stack.enter_context(
            patch("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
        )
        stack.enter_context(patch("torch.cuda.is_bf16_supported", lambda *_: True))
        stack.enter_context(patch.object(Tensor, "backward", walk_back))
        stack.enter_context(patch.object(Tensor, "pin_memory", _pinned))
        yield stack.enter_context(FakeTensorMode())


def _pinned(tensor: Tensor) -> Tensor:
    """A fake tensor lies nowhere: it only says so."""
    tensor.is_pinned_here = True  # type: ignore[attr-defined]
    return tensor


@dataclass
class _Arrived:
    """Gradients on their way into one node of the graph, by place."""

    grads: dict[int, Tensor] = field(default_factory=dict)

    def add(self, node: Any, place: int, grad: Tensor) -> None:
        """Take a gradient, in the shape and type that the forward pass had there."""
        if hasattr(node, "_input_metadata"):
            wanted = node._input_metadata[place]
            if tuple(wanted.shape) != tuple(grad.shape):
                grad = grad.sum_to_size(tuple(wanted.shape))
            grad = grad.to(wanted.dtype)
        before = self.grads.get(place)
        self.grads[place] = grad if before is None else before + grad

    def ordered(self, node: Any) -> list[Tensor | None]:
        """All of the node's gradients, None where nothing came."""
        count = len(node._input_metadata) if hasattr(node, "_input_metadata") else 1
        return [self.grads.get(place) for place in range(max(count, 1 + max(self.grads)))]


def _uses(root: Any) -> Counter[Any]:
    """How many edges lead into each node below the root."""
    uses: Counter[Any] = Counter()
    seen, todo = {root}, [root]
    while todo:
        for below, _ in todo.pop().next_functions:
            if below is None:
                continue
            uses[below] += 1
            if below not in seen:
                seen.add(below)
                todo.append(below)
    return uses


@torch.no_grad()
def walk_back(loss: Tensor) -> None:
    """What `loss.backward()` does, without autograd's engine: newest node first."""
    root: Any = loss.grad_fn
    waiting = _uses(root)
    arrived: defaultdict[Any, _Arrived] = defaultdict(_Arrived)
    arrived[root].add(root, 0, torch.ones_like(loss))
    ready = [root]
    while ready:
        ready.sort(key=lambda node: int(node._sequence_nr()))
        node = ready.pop()
        found = _apply(node, arrived.pop(node, _Arrived()))
        for (below, place), grad in zip(node.next_functions, found, strict=True):
            if below is None:
                continue
            if grad is not None:
                arrived[below].add(below, place, grad)
            waiting[below] -= 1
            if not waiting[below]:
                ready.append(below)


def _apply(node: Any, into: _Arrived) -> tuple[Tensor | None, ...]:
    """Gradients that a node hands on; a leaf keeps its own."""
    below = node.next_functions
    if not into.grads:
        return (None,) * len(below)
    if hasattr(node, "variable"):
        leaf, grad = node.variable, into.grads[0]
        leaf.grad = grad if leaf.grad is None else leaf.grad + grad
        return ()
    if isinstance(node, BackwardCFunction):
        # One for each argument of the function; those that are no tensors come last and get none.
        found = node.apply(*into.ordered(node))[: len(below)]
    else:
        found = node(*into.ordered(node))
    return found if isinstance(found, tuple) else (found,)


class Watched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operator calls that are not views, by name; bytes alive, and their peak; host waits."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()
        self.waits: list[str] = []
        self.live = self.peak = 0
        self._known: set[int] = set()

    @property
    def total(self) -> int:
        """All calls."""
        return self.calls.total()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator and note it."""
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        if not (name.startswith(_FREE) or name in _ALIASES or _is_view(func)):
            self.calls[name.removeprefix("aten::")] += 1
        tensors = [x for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, Tensor)]
        for tensor in tensors:
            self._hold(tensor)
        if _waits(func, tensors, args, kwargs or {}):
            self.waits.append(name)
        return out

    def _hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or tensor.device.type == "cpu":
            return
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def _waits(func: Any, made: list[Tensor], args: Any, kwargs: dict[str, Any]) -> bool:
    """Does it move data between host and device while the host looks on?

    Reading a number (`item`, `nonzero`, a branch on a value) needs no rule: a fake tensor refuses.
    """
    given = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    places = {x.device.type for x in (*made, *given) if x.dim()}
    asked = kwargs.get("non_blocking") or (
        func._schema.name == "aten::copy_" and args[2:] == (True,)
    )
    if len(places) < 2:
        return False
    to_device = any(x.is_cuda for x in made)
    pageable = (x.device.type == "cpu" and not hasattr(x, "is_pinned_here") for x in given)
    return not asked or (to_device and any(pageable))


def _is_view(func: Any) -> bool:
    """Does it only give its argument another shape?"""
    returns = [r.alias_info for r in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in returns)
