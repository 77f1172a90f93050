"""Named ranges for the profiler, and for NVTX where it is switched on.

The names are part of the public contract: `nsa.cmp`, `nsa.sel.scores`, `nsa.sel.ranges_v1`,
`nsa.sel.ranges_v2`, `nsa.sel.attend`, `nsa.win`, `nsa.gate`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_nvtx_enabled = False
_counts: Counter[str] | None = None


def enable_nvtx(on: bool) -> None:
    """Emit NVTX ranges beside the profiler's from now on (needs CUDA to have an effect)."""
    global _nvtx_enabled
    _nvtx_enabled = on


@contextmanager
def count_ranges() -> Iterator[Counter[str]]:
    """Count the ranges entered meanwhile, by name: proof of which code ran, without a profiler."""
    global _counts
    _counts = counts = Counter[str]()
    try:
        yield counts
    finally:
        _counts = None


@contextmanager
def profile_range(name: str) -> Iterator[None]:
    """Mark the enclosed work as `name` for torch.profiler, and for NVTX where enabled."""
    if _counts is not None:
        _counts[name] += 1
    nvtx = _nvtx_enabled and torch.cuda.is_available()
    if nvtx:
        torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
    try:
        with torch.profiler.record_function(name):
            yield
    finally:
        if nvtx:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
