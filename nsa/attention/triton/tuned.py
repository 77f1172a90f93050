"""How kernels are cut on a device where that was measured, in the place of what `tiles` assumes.

`python -m benchmarks.triton_tune --save` writes one file of tuned/ for a device, by the name that
its driver gives it: the shape and the lengths that were measured, and the parts of a cut that were
faster there than the assumed ones. A device without a file takes that of one with the same compute
capability, which is nearer to it than what was assumed for all. Other shapes keep the assumed ones.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from nsa.attention.triton.tiles import Tile
from nsa.config import NSAConfig

FOLDER = Path(__file__).parent / "tuned"
# What each branch's kernels are compiled for; an operator knows no more of the config than that.
_SHAPE = {
    "selected": ("heads_per_group", "d_k", "d_v", "l_sel", "n_sel"),
    "compressed": ("heads_per_group", "d_k", "d_v", "l", "d"),
    # The choice of blocks, cut together with the compressed branch.
    "top": ("heads_per_group", "d_k", "l", "d", "l_sel", "n_sel"),
    "window": ("heads_per_group", "d_k", "d_v", "w"),
}

Cut = TypeVar("Cut")


def file_of(device: str) -> Path:
    """Where the choices of a device are, by its name."""
    return FOLDER / f"{re.sub(r'[^A-Za-z0-9]+', '-', device).strip('-')}.json"


def shape_of(branch: str, cfg: NSAConfig, itemsize: int) -> dict[str, int]:
    """What has to be as it was measured. itemsize: bytes of a number of the queries."""
    return {name: getattr(cfg, name) for name in _SHAPE[branch]} | {"itemsize": itemsize}


def shapes_of(cfg: NSAConfig, itemsize: int) -> dict[str, dict[str, int]]:
    """The same of all branches."""
    return {branch: shape_of(branch, cfg, itemsize) for branch in _SHAPE}


def get(cut: Any, field: str) -> Any:
    """A part of a cut, "by_block.forward" of a part of it; None where it lacks that part."""
    head, _, rest = field.partition(".")
    inner = getattr(cut, head)
    return get(inner, rest) if rest and inner is not None else inner


def put(cut: Any, field: str, value: Any) -> Any:
    """The cut with one part exchanged; as it is where it lacks that part."""
    head, _, rest = field.partition(".")
    inner = getattr(cut, head)
    if rest and inner is None:
        return cut
    return dataclasses.replace(cut, **{head: put(inner, rest, value) if rest else value})


def tuned(branch: str, cut: Cut, cfg: NSAConfig, q: Tensor) -> Cut:
    """The cut of a branch for q [B,S,G,h,Dk] as it was best on q's device."""
    if not q.is_cuda:
        return cut
    device, capability = _device(q.device.index)
    found: Cut = _with_choices(branch, cut, cfg, q.shape[1], q.dtype.itemsize, device, capability)
    return found


@cache
def _device(index: int) -> tuple[str, str]:
    """Name and compute capability."""
    major, minor = torch.cuda.get_device_capability(index)
    return torch.cuda.get_device_name(index), f"{major}.{minor}"


@cache
def _with_choices(
    branch: str, cut: Any, cfg: NSAConfig, seq_len: int, itemsize: int, device: str, capability: str
) -> Any:
    document = measured(device, capability)
    if document is None or document["shapes"][branch] != shape_of(branch, cfg, itemsize):
        return cut
    for field, value in nearest(document, branch, seq_len).items():
        cut = put(cut, field, Tile(**value) if isinstance(value, dict) else value)
    return cut


def measured(device: str, capability: str) -> dict[str, Any] | None:
    """The file of a device, or the first of its capability; None where there is neither."""
    documents = [json.loads(path.read_text("utf-8")) for path in sorted(FOLDER.glob("*.json"))]
    alike = [one for one in documents if one["capability"] == capability]
    return next((one for one in alike if one["device"] == device), alike[0] if alike else None)


def nearest(document: dict[str, Any], branch: str, seq_len: int) -> dict[str, Any]:
    """Values by field, those of the measured length whose ratio to seq_len is the smallest.

    None of a branch that was not measured.
    """
    lengths = document["lengths"].get(branch)
    if not lengths:
        return {}
    best = min(lengths, key=lambda n: (abs(math.log(n / seq_len)), n))
    return {
        one["field"]: one["value"]
        for one in document["choices"]
        if (one["branch"], one["seq_len"]) == (branch, best)
    }
