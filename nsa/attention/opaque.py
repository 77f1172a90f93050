"""Functions as operators of torch: known to autograd, to torch.compile and to profilers.

A compiler does not look into an operator: what runs in it is what runs without a compiler. Its
arguments are tensors and numbers, so a config is made again of shapes and numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from nsa.config import MIN_N_SEL, NSAConfig

Gradients = Callable[..., Sequence[Tensor]]
Function = TypeVar("Function", bound=Callable[..., Any])


def operator(fake: Callable[..., Any]) -> Callable[[Function], Function]:
    """Register a function under its name. fake: its results for tensors that hold no numbers."""

    def register(function: Function) -> Function:
        made = torch.library.custom_op(f"nsa::{function.__name__}", function, mutates_args=())
        made.register_fake(fake)
        return cast("Function", made)

    return register


def config_of(q: Tensor, v: Tensor, **numbers: Any) -> NSAConfig:
    """What operators read of a config: shapes of q [B,S,G,h,Dk] and v [..,Dv], numbers, phi.

    The other numbers are any that fit these.
    """
    groups, heads, d_k = q.shape[2:]
    d = numbers.get("d", numbers.get("l_sel", 1))
    rest: dict[str, Any] = {"l": d, "d": d, "l_sel": d, "n_sel": MIN_N_SEL, **numbers}
    return NSAConfig(
        dim=1, n_heads=groups * heads, n_kv_groups=groups, d_k=d_k, d_v=v.shape[-1], **rest
    )  # fmt: skip


def differentiate(operator: Any, gradients: Gradients, *, results: int, first: int = 0) -> None:
    """Tell autograd how an operator (tensors, numbers) -> (output, lse, ...) derives.

    `gradients` of (gradient of the output, the operator's tensors, so many of its first results,
    from number `first` on, its numbers) are those of its first tensors; nothing else has one.
    """

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        made = output if isinstance(output, tuple) else (output,)
        ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)), *made[first:results])
        ctx.numbers = tuple(x for x in inputs if not isinstance(x, Tensor))
        ctx.n_inputs = len(inputs)
        ctx.mark_non_differentiable(*made[1:])
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        found = () if grad is None else gradients(grad, *ctx.saved_tensors, *ctx.numbers)
        return (*found, *(None,) * (ctx.n_inputs - len(found)))

    operator.register_autograd(backward, setup_context=keep)
