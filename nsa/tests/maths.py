"""The shape, the device and the numbers on which attention is tested by itself, and its pieces."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nsa.attention import branches
from nsa.attention.cpu import pieces

Inputs = dict[str, Tensor]
SMALL = {
    "dim": 24,
    "n_heads": 6,
    "n_kv_groups": 2,
    "d_k": 8,
    "d_v": 6,
    "l": 8,
    "d": 4,
    "l_sel": 8,
    "n_sel": 4,
    "w": 10,
    "phi": "avg",
}


# Many tiny parallel regions: threads that wait for a busy core cost minutes, and their waiting
# counts as the CPU time by which the paths are compared.
if not torch.cuda.is_available():
    torch.set_num_threads(1)


def device() -> torch.device:
    """The device under test: the GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def random_inputs(
    shape: dict[str, int], batch: int, seq_len: int, *, seed: int, dtype: torch.dtype
) -> Inputs:
    """Leaf tensors for one attention call with phi "avg"."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        values = torch.randn(*size, generator=generator, dtype=torch.float64)
        return values.to(device=device(), dtype=dtype)

    heads, groups = shape["n_heads"], shape["n_kv_groups"]
    inputs = {"q": normal(batch, seq_len, heads, shape["d_k"])}
    for branch in ("cmp", "sel", "win"):
        inputs[f"k_{branch}"] = normal(batch, seq_len, groups, shape["d_k"])
        inputs[f"v_{branch}"] = normal(batch, seq_len, groups, shape["d_v"])
    inputs["gates"] = normal(batch, seq_len, heads, 3).sigmoid()
    return {name: value.requires_grad_() for name, value in inputs.items()}


# Queries of a block; bytes of partial results, of scores, and of a chunk's rows. Partial results of
# float32 go over two blocks at once, so that queries behind a block are among its pieces.
_SIZES = {
    (pieces, "SPLIT"): 3,
    (pieces, "PARTIAL_BYTES"): 1 << 13,
    (pieces, "PIECE_BYTES"): 1 << 10,
    (branches, "CHUNK_BYTES"): 1 << 11,
}


def cut_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends, whatever cuts work into pieces makes them small."""
    for (module, name), size in _SIZES.items():
        assert getattr(module, name) > size
        monkeypatch.setattr(module, name, size)
