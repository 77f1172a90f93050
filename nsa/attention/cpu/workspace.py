"""Scratch memory that outlives a call.

Fresh memory costs a page fault per 4 KiB, which at these sizes is a tenth of the whole layer; so
one thread's calls share their scratch, whose size the cutting of the work bounds.
"""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor

_threads = threading.local()


class Workspace:
    """Named scratch tensors of one type."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._kept: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int) -> Tensor:
        """Uninitialised memory of this shape; taking the same name again overwrites it."""
        size = math.prod(shape)
        kept = self._kept.get(name)
        if kept is None or kept.numel() < size:
            self._kept.pop(name, None)
            kept = torch.empty(size, dtype=self._dtype)
            self._kept[name] = kept
        return kept[:size].view(shape)


def workspace(dtype: torch.dtype) -> Workspace:
    """This thread's workspace for a type."""
    spaces: dict[torch.dtype, Workspace] | None = getattr(_threads, "spaces", None)
    if spaces is None:
        spaces = {}
        _threads.spaces = spaces
    if dtype not in spaces:
        spaces[dtype] = Workspace(dtype)
    return spaces[dtype]
