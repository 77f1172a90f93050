"""What every launch of a kernel needs: room for results, strides, the device, and the cut.

How kernels are cut where that was measured takes the place of what the package assumes.
`python -m benchmarks.triton_tune --save` writes one file of tuned/ for a device, by the name that
its driver gives it: the shape that was measured, and of each branch and length the parts of a cut
that were faster there than the assumed ones. `untimed`: no device has run these, they take the
place of some that spilled; `python -m benchmarks.triton_aot --tuned` allows none that spills. A
device without a file takes that of one with the same compute capability, which is nearer to it than
what was assumed for all. Other shapes keep the assumed ones.
"""

from __future__ import annotations

import json
import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nsa.attention.triton import CHOOSERS, Tile, register_limit
from nsa.config import NSAConfig

_LOG2_E = math.log2(math.e)


def results_of(q: Tensor, cfg: NSAConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Room for the output [B,S,G,h,Dv] and the log-sum-exp [B*G, S*h] of q [B,S,G,h,Dk]."""
    batch, seq_len, groups, heads = q.shape[:4]
    out = torch.empty(batch, seq_len, groups, heads, cfg.d_v, dtype=dtype, device=q.device)
    lse = torch.empty(batch * groups, seq_len * heads, dtype=torch.float32, device=q.device)
    return out, lse


def inner(x: Tensor) -> Tensor:
    """Kernels step through the last dimension by one; the others lie as they are."""
    return x if x.stride(-1) == 1 else x.contiguous()


def strides_of(q: Tensor, k: Tensor, v: Tensor) -> list[int]:
    """Of q [B,S,G,h,Dk] and of k, v [B,T,G,D], the last dimensions' left out."""
    return [*q.stride()[:4], *k.stride()[:3], *v.stride()[:3]]


def how(tile: Tile) -> dict[str, int]:
    """A tile as a kernel is told of it, on the current device."""
    told = {"ROWS": tile.rows, "num_warps": tile.warps, "num_stages": tile.stages}
    major = torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 0
    limit = register_limit(major)
    return told if limit is None else {**told, "maxnreg": limit}


def scale_of(cfg: NSAConfig) -> float:
    """Scores to the base 2."""
    return float(cfg.d_k**-0.5 * _LOG2_E)


def device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Kernels start on the current device: make it the tensor's."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def head_constants(cfg: NSAConfig) -> dict[str, int]:
    """What kernels of all branches are compiled for."""
    return {"HEADS": cfg.heads_per_group, "D_K": cfg.d_k, "D_V": cfg.d_v}


FOLDER = Path(__file__).parent / "tuned"
# What each branch's kernels are compiled for.
_SHAPE = {
    "selected": ("heads_per_group", "d_k", "d_v", "l_sel", "n_sel"),
    "compressed": ("heads_per_group", "d_k", "d_v", "l", "d"),
    # The choice of blocks, cut together with the compressed branch.
    "top": ("heads_per_group", "d_k", "l", "d", "l_sel", "n_sel"),
    "window": ("heads_per_group", "d_k", "d_v", "w"),
}


def shapes_of(cfg: NSAConfig, itemsize: int) -> dict[str, dict[str, int]]:
    """What has to be as it was measured, of each branch. itemsize: bytes of a query's number."""
    return {
        branch: {name: getattr(cfg, name) for name in shape} | {"itemsize": itemsize}
        for branch, shape in _SHAPE.items()
    }


def put(part: Any, told: Any) -> Any:
    """A cut, or a part of one, with what is told of its parts; None where it lacks that part."""
    if part is None or not isinstance(told, dict):
        return None if part is None else told
    return replace(part, **{name: put(getattr(part, name), one) for name, one in told.items()})


def cut_of(branch: str, q: Tensor, cfg: NSAConfig) -> Any:
    """The cut of a branch (of `CHOOSERS`) for q [B,S,G,h,Dk] as it was best on q's device."""
    batch, seq_len, groups = q.shape[:3]
    cut = CHOOSERS[branch](cfg, seq_len, batch * groups)
    if not q.is_cuda:
        return cut
    return _with_choices(branch, cut, cfg, seq_len, q.dtype.itemsize, *_device(q.device.index))


@cache
def _device(index: int) -> tuple[str, str]:
    """Name and compute capability."""
    major, minor = torch.cuda.get_device_capability(index)
    return torch.cuda.get_device_name(index), f"{major}.{minor}"


@cache
def _with_choices(
    branch: str, cut: Any, cfg: NSAConfig, seq_len: int, itemsize: int, device: str, capability: str
) -> Any:
    document, shapes = measured(device, capability), shapes_of(cfg, itemsize)
    if document is None or document["shapes"][branch] != shapes[branch]:
        return cut
    return put(cut, nearest(document, branch, seq_len))


def measured(device: str, capability: str) -> dict[str, Any] | None:
    """The file of a device, or the first of its capability; None where there is neither."""
    documents = [json.loads(path.read_text("utf-8")) for path in sorted(FOLDER.glob("*.json"))]
    alike = [one for one in documents if one["capability"] == capability]
    return next((one for one in alike if one["device"] == device), alike[0] if alike else None)


def nearest(document: dict[str, Any], branch: str, seq_len: int) -> dict[str, Any]:
    """The choices of the measured length whose ratio to seq_len is the smallest.

    None of a branch that was not measured.
    """
    lengths: dict[str, dict[str, Any]] = document["choices"].get(branch, {})
    best = min(lengths, key=lambda n: (abs(math.log(int(n) / seq_len)), int(n)), default="")
    return lengths.get(best, {})
