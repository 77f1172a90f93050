"""Between the branches: the gated sum and its gradients."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.grids import Kernel, Work
from nsa.config import NSAConfig

# The compressed branch is float32 in every call, the others are of the call's type.
_POINTERS = dict.fromkeys(("cmp", "d_cmp"), "fp32")
_OWN = ("sel", "win", "gates", "d_sel", "d_win", "d_gates")
_WIDE = 4


def kernels(cfg: NSAConfig, seq_len: int, pairs: int) -> Iterator[Kernel]:
    """Every kernel; none depends on the length or on how many pairs there are."""
    from nsa.attention.triton import mix, mix_launch

    for name, function in (("mix", mix.mix_kernel), ("mix backward", mix.mix_backward_kernel)):
        yield Kernel(
            name=name, function=function, warps=4, stages=3, dots=False, pointers=_POINTERS,
            own=_OWN, constants=mix_launch.constants(cfg.n_heads, cfg.d_v),
        )  # fmt: skip


def work(cfg: NSAConfig, seq_len: int, size: int = 2) -> Iterator[Work]:
    """No products on tensor cores; each number is read and written once."""
    rows = seq_len * cfg.n_heads
    gates, branches = rows * 3 * size, rows * cfg.d_v * (_WIDE + 2 * size)
    one = rows * cfg.d_v * size
    forward, backward = branches + gates + one, 2 * (branches + gates) + one
    for name, is_backward, moved in (("mix", False, forward), ("mix backward", True, backward)):
        yield Work(kernel=name, backward=is_backward, flops=0, needed=0, least=moved, most=moved)
