"""What the operators of all branches share: their config, and how autograd knows them.

Operators take numbers instead of a config, because an operator's arguments are tensors and numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from nsa.config import NSAConfig

Gradients = Callable[..., tuple[Tensor, Tensor, Tensor]]


def config_of(q: Tensor, d_v: int, **numbers: Any) -> NSAConfig:
    """What the kernels read of a config, with the numbers of q [B,S,G,h,Dk] and of the operator."""
    groups, heads, d_k = q.shape[2:]
    return NSAConfig(
        dim=1, n_heads=groups * heads, n_kv_groups=groups, d_k=d_k, d_v=d_v, **numbers
    )  # fmt: skip


def differentiate(operator: Any, gradients: Gradients) -> None:
    """Tell autograd how an operator (q, k, v, tensors, numbers) -> (output, lse, ...) derives.

    `gradients` of (gradient of the output, the operator's tensors, output and lse, its numbers) are
    those of q, k and v; nothing else has one.
    """

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)), *output[:2])
        ctx.numbers = tuple(x for x in inputs if not isinstance(x, Tensor))
        ctx.n_inputs = len(inputs)
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        found: tuple[Tensor | None, ...] = ()
        if grad is not None:
            found = gradients(grad, *ctx.saved_tensors, *ctx.numbers)
        return (*found, *(None,) * (ctx.n_inputs - len(found)))

    operator.register_autograd(backward, setup_context=keep)
