"""The window branch: every query sees the last w tokens, its own included.

Masked SDPA over stretches of w queries runs on any device. torch's `varlen_attn` needs no mask, no
padding and no copy of the keys, but a flash kernel. Which torch has it, and what that kernel asks
for, is written here only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from nsa.attention.branches import split_dim
from nsa.config import NSAConfig

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Tensor]

# Of `varlen_attn`: torch 2.11 has no word for heads that share a key: they get copies of it.
_SHARED = "enable_gqa"
# The operator that it is to profilers and dispatch modes.
VARLEN_OPERATOR = "_varlen_attn"
# The operator under it, for which a build and a device have a kernel or not.
_FLASH = "aten::_flash_attention_forward"
_FLASH_TYPES = (torch.bfloat16, torch.float16)
_FLASH_WIDTH, _FLASH_MULTIPLE = 256, 8
_FLASH_CAPABILITY = (8, 0)


def _varlen() -> Callable[..., Any]:
    """torch's `varlen_attn`, loaded when it is asked for."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn


def varlen_problem(
    cfg: NSAConfig, dtype: torch.dtype, device: torch.device, *, use_flash: bool = True
) -> str | None:
    """Why `varlen_window` cannot run for this shape, type and device; None where it can."""
    if not use_flash:
        return "flash kernels are switched off"
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    if device.type not in ("cpu", "cuda") or not has_kernel(_FLASH, device.type.upper()):
        return f"this torch has no flash attention for device {device.type}"
    if device.type == "cuda" and torch.cuda.is_available():
        found = torch.cuda.get_device_capability(device)
        if found < _FLASH_CAPABILITY:
            return f"flash attention needs compute capability 8.0, this is {found[0]}.{found[1]}"
    if dtype not in _FLASH_TYPES:
        return f"flash attention has no {str(dtype).removeprefix('torch.')}"
    if cfg.d_k != cfg.d_v or cfg.d_k % _FLASH_MULTIPLE or cfg.d_k > _FLASH_WIDTH:
        return (
            f"d_k={cfg.d_k}, d_v={cfg.d_v}: flash attention needs d_k = d_v, a multiple of "
            f"{_FLASH_MULTIPLE} up to {_FLASH_WIDTH}"
        )
    return None


def varlen_window(q: Tensor, k: Tensor, v: Tensor, cfg: NSAConfig) -> Tensor:
    """Window branch [B,S,G,h,Dv] of q [B,S,G,h,Dk] on k, v [B,S,G,D], by `varlen_attn`.

    The sequences of the batch lie behind each other as one row of tokens; `ends` says where each
    begins. A query sees `left` tokens before its own.
    """
    batch, seq_len, _, heads = q.shape[:4]
    function = _varlen()
    shares = _SHARED in inspect.signature(function).parameters
    k, v = (t.flatten(0, 1) if shares else _for_each_head(t.flatten(0, 1), heads) for t in (k, v))
    ends = torch.arange(0, (batch + 1) * seq_len, seq_len, dtype=torch.int32, device=q.device)
    out: Tensor = function(
        q.flatten(0, 1).flatten(1, 2),
        k,
        v,
        ends,
        ends,
        seq_len,
        seq_len,
        scale=cfg.d_k**-0.5,
        window_size=(cfg.w - 1, 0),
        **({_SHARED: True} if shares else {}),
    )
    return split_dim(split_dim(out, 1, heads), 0, seq_len)


def _for_each_head(x: Tensor, heads: int) -> Tensor:
    """Keys or values [T,G,D] as [T,G*h,D]: each group's, once for each of its query heads."""
    return x[:, :, None].expand(-1, -1, heads, -1).flatten(1, 2)


def _band(count: int, w: int, q: Tensor) -> Tensor:
    """Bias [count,1,w,2*w] of `count` stretches of w queries, each on its keys and the w before.

    Query i of a stretch sees keys i + 1 .. i + w of those 2*w; before the first stretch is nothing.
    """
    hidden = q.new_full((count, w, 2 * w), float("-inf"))
    bias = hidden.tril().add_(hidden.triu_(w + 1))
    bias[0, :, :w] = float("-inf")
    return bias[:, None]


def masked_window(q: Tensor, k: Tensor, v: Tensor, cfg: NSAConfig, attend: Attend) -> Tensor:
    """Window branch [B,S,G,h,Dv] of q [B,S,G,h,Dk] on k, v [B,S,G,D], for S > w, by masks."""
    batch, seq_len, groups, heads = q.shape[:4]
    w = cfg.w
    count = -(-seq_len // w)
    rest = count * w - seq_len
    rows = pad(q, (0, 0, 0, 0, 0, 0, 0, rest)) if rest else q
    rows = split_dim(rows, 1, w).flatten(0, 1).flatten(2, 3).transpose(1, 2)
    keys, values = (
        pad(t, (0, 0, 0, 0, w, rest))
        .unfold(1, 2 * w, w)
        .transpose(3, 4)[:, :, :, None]
        .expand(-1, -1, -1, heads, -1, -1)
        .reshape(batch * count, groups * heads, 2 * w, t.shape[-1])
        for t in (k, v)
    )
    bias = _band(count, w, rows)
    if batch > 1:
        bias = bias.repeat(batch, 1, 1, 1)
    out = split_dim(attend(rows, keys, values, bias, cfg.d_k**-0.5).transpose(1, 2), 0, count)
    return split_dim(out.flatten(1, 2)[:, :seq_len], 2, heads)
