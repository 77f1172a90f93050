"""Named ranges for the profiler, and for NVTX where it is switched on.

The names are part of the public contract: `nsa.cmp`, `nsa.sel.scores`, `nsa.sel.ranges_v1`,
`nsa.sel.ranges_v2`, `nsa.sel.attend`, `nsa.win`, `nsa.gate`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_nvtx_enabled = False


def enable_nvtx(on: bool) -> None:
    """Emit NVTX ranges beside the profiler's from now on (needs CUDA to have an effect)."""
    global _nvtx_enabled
    _nvtx_enabled = on


@contextmanager
def profile_range(name: str) -> Iterator[None]:
    """Mark the enclosed work as `name` for torch.profiler, and for NVTX where enabled."""
    nvtx = _nvtx_enabled and torch.cuda.is_available()
    if nvtx:
        torch.cuda.nvtx.range_push(name)
    try:
        with torch.profiler.record_function(name):
            yield
    finally:
        if nvtx:
            torch.cuda.nvtx.range_pop()
