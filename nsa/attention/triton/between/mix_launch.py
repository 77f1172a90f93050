"""Starts the gated sum's kernels: allocates results, computes grids, never asks the device."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from nsa.attention.triton.between.mix import mix_backward_kernel, mix_kernel
from nsa.attention.triton.launch import device_of, inner
from nsa.attention.triton.tiles import padded

# Of a branch that a program takes: 16 for each thread, and several programs for each
# multiprocessor from 2,000 tokens of the production shape on.
_NUMBERS = 2048


def constants(heads: int, d_v: int) -> dict[str, int]:
    """What the kernels are compiled for; heads: of all groups."""
    width = padded(d_v)
    return {"HEADS": heads, "D_V": d_v, "WIDTH_V": width, "ROWS": max(1, _NUMBERS // width)}


def forward(cmp: Tensor, sel: Tensor, win: Tensor, gates: Tensor) -> Tensor:
    """Output [B,S,H,Dv], in the type of the gates [B,S,H,3], of branches [B,S,H,Dv]."""
    tensors = [inner(x) for x in (cmp, sel, win, gates)]
    out = torch.empty(cmp.shape, dtype=gates.dtype, device=gates.device)
    grid, told = _how(out)
    with device_of(out):
        mix_kernel[grid](*tensors, out, cmp.shape[1], *_strides(tensors), **told)
    return out


def backward(
    grad: Tensor, cmp: Tensor, sel: Tensor, win: Tensor, gates: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the three branches and of the gates, contiguous; equal bits each time."""
    tensors = [inner(x) for x in (grad, cmp, sel, win, gates)]
    d_cmp, d_sel, d_win, d_gates = (
        torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in tensors[1:]
    )
    grid, told = _how(d_cmp)
    with device_of(grad):
        mix_backward_kernel[grid](
            *tensors, d_cmp, d_sel, d_win, d_gates, cmp.shape[1], *_strides(tensors), **told
        )
    return d_cmp, d_sel, d_win, d_gates


def _how(out: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """Grid of a launch for branches like `out`, and what its kernel is compiled for."""
    batch, seq_len, heads, d_v = out.shape
    told = constants(heads, d_v)
    return (triton.cdiv(seq_len * heads, told["ROWS"]), batch), told


def _strides(tensors: list[Tensor]) -> list[int]:
    """Of tensors [B,S,H,D], the last dimensions' left out."""
    return [stride for x in tensors for stride in x.stride()[:3]]
