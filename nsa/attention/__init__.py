"""Native Sparse Attention as functions of tensors; the module on top is `nsa.NSAAttention`."""

from __future__ import annotations

from nsa.attention.api import (
    PathChoice,
    choose_path,
    choose_selected,
    choose_window,
    nsa_attention,
    select_blocks,
)
from nsa.attention.selection import block_map, ranges_v1, ranges_v2

__all__ = [
    "PathChoice",
    "block_map",
    "choose_path",
    "choose_selected",
    "choose_window",
    "nsa_attention",
    "ranges_v1",
    "ranges_v2",
    "select_blocks",
]
