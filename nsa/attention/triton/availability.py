"""Can the Triton kernels run here? Does not import them, nor triton."""

from __future__ import annotations

import importlib.util
import os

import torch

from nsa.attention.triton.tiles import shape_problem
from nsa.config import NSAConfig

_TYPES = (torch.bfloat16, torch.float16, torch.float32)
_CAPABILITY = (8, 0)
# Triton's own: its kernels then run in Python, on any device, for tests.
_INTERPRETED = "TRITON_INTERPRET"


def triton_problem(
    cfg: NSAConfig, dtype: torch.dtype, device: torch.device, seq_len: int | None = None
) -> str | None:
    """Why the kernels cannot run for this shape, type and device; None where they can."""
    if device.type == "cuda":
        found = torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (0, 0)
        if found < _CAPABILITY:
            return f"Triton needs compute capability 8.0, this is {found[0]}.{found[1]}"
    elif os.environ.get(_INTERPRETED) != "1":
        return f"Triton needs a CUDA device, this is {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if dtype not in _TYPES:
        return f"the Triton kernels have no {str(dtype).removeprefix('torch.')}"
    return shape_problem(cfg, seq_len)
