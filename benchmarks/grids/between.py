"""Between the branches: pooled keys and values, the gated sum, and the gradients of both."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.grids import Kernel, Work
from nsa.config import NSAConfig

# The compressed branch, its keys and its values are float32 in every call.
_POINTERS = dict.fromkeys(("cmp", "d_cmp", "pooled_k", "pooled_v", "grad_k", "grad_v"), "fp32")
_OWN = ("sel", "win", "gates", "d_sel", "d_win", "d_gates")
_WIDE = 4


def kernels(cfg: NSAConfig, seq_len: int, pairs: int) -> Iterator[Kernel]:
    """Every kernel; none depends on the length or on how many pairs there are."""
    from nsa.attention.triton.between import launch, mix, pool

    mixed, pooled = launch.mix_constants(cfg.n_heads, cfg.d_v), launch.pool_constants(cfg)
    for name, function, constants in (
        ("pool", pool.pool_kernel, pooled),
        ("mix", mix.mix_kernel, mixed),
        ("mix backward", mix.mix_backward_kernel, mixed),
        ("pool backward", pool.pool_backward_kernel, pooled),
    ):
        yield Kernel(
            name=name, function=function, warps=4, stages=3, dots=False, pointers=_POINTERS,
            own=_OWN, constants=constants,
        )  # fmt: skip


def work(cfg: NSAConfig, seq_len: int, size: int = 2) -> Iterator[Work]:
    """No products on tensor cores. What blocks, or tokens, have in common may be read again."""
    rows = seq_len * cfg.n_heads
    gates, branches = rows * 3 * size, rows * cfg.d_v * (_WIDE + 2 * size)
    one = rows * cfg.d_v * size
    width = cfg.n_kv_groups * (cfg.d_k + cfg.d_v)
    given, means = seq_len * width * size, cfg.n_compressed(seq_len) * width * _WIDE
    again = cfg.l // cfg.d
    for name, backward, least, more in (
        ("pool", False, given + means, (again - 1) * given),
        ("mix", False, branches + gates + one, 0),
        ("mix backward", True, 2 * (branches + gates) + one, 0),
        ("pool backward", True, given + means, 0),
    ):
        yield Work(kernel=name, backward=backward, flops=0, needed=0, least=least,
                   most=least + more)  # fmt: skip
