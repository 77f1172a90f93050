"""The gated sum of the branches as operators of torch: `nsa::mix` and `nsa::mix_backward`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# What it is to profilers and dispatch modes.
MIX_OPERATOR = "mix"


@torch.library.custom_op(f"nsa::{MIX_OPERATOR}", mutates_args=())
def mix(cmp: Tensor, sel: Tensor, win: Tensor, gates: Tensor) -> Tensor:
    """Sum of the branches [B,S,H,Dv], each times its gate [B,S,H,3], in the type of the gates."""
    from nsa.attention.triton.between import mix_launch

    return mix_launch.forward(cmp, sel, win, gates)


@mix.register_fake
def _(cmp: Tensor, sel: Tensor, win: Tensor, gates: Tensor) -> Tensor:
    return gates.new_empty(cmp.shape)


@torch.library.custom_op("nsa::mix_backward", mutates_args=())
def mix_backward(
    grad: Tensor, cmp: Tensor, sel: Tensor, win: Tensor, gates: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the three branches and of the gates from that of the output."""
    from nsa.attention.triton.between import mix_launch

    return mix_launch.backward(grad, cmp, sel, win, gates)


@mix_backward.register_fake
def _(
    grad: Tensor, cmp: Tensor, sel: Tensor, win: Tensor, gates: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_cmp, d_sel, d_win, d_gates = (x.new_empty(x.shape) for x in (cmp, sel, win, gates))
    return d_cmp, d_sel, d_win, d_gates


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = mix_backward(grad, *ctx.saved_tensors)
    return found


mix.register_autograd(_gradients, setup_context=_keep)


def mix_by_triton(cmp: Tensor, sel: Tensor, win: Tensor, gates: Tensor) -> Tensor:
    """Gated sum [B,S,H,Dv] of branches [B,S,G,h,Dv], by gates [B,S,H,3]."""
    out: Tensor = mix(*(x.flatten(2, 3) for x in (cmp, sel, win)), gates)
    return out
