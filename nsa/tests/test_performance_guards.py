"""The vectorized selection ranges (v2) are faster than the plain loops (v1), by measurement."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nsa.attention.selection import ranges_v1, ranges_v2, top_blocks
from nsa.config import NSAConfig
from nsa.tests import maths

# (batch, sequence length, n_sel): the production shape on a GPU, smaller ones on a CPU.
CPU_SHAPES = ((1, 256, 4), (1, 512, 8), (2, 512, 16))
CUDA_SHAPES = ((1, 1024, 16), (1, 2048, 16), (4, 2048, 16))
SHAPES = CUDA_SHAPES if torch.cuda.is_available() else CPU_SHAPES
BLOCKS = 7
# Student's t, one-sided 99 %, for BLOCKS - 1 = 6 degrees of freedom.
T_99 = 3.143


def _selection(batch: int, seq_len: int, cfg: NSAConfig) -> Tensor:
    """Blocks as training makes them: the forced ones and a random rest."""
    generator = torch.Generator().manual_seed(1)
    n_blocks = cfg.n_blocks(seq_len)
    scores = torch.rand(batch, cfg.n_kv_groups, seq_len, n_blocks, generator=generator)
    positions = torch.arange(seq_len)
    blocks = top_blocks(scores, positions, cfg).transpose(1, 2).contiguous()
    return blocks.to(maths.device())


def _seconds(build: Callable[[Tensor, NSAConfig], Tensor], blocks: Tensor, cfg: NSAConfig) -> float:
    """Time of one call: CPU time on a CPU, wall time with a synchronized GPU otherwise."""
    if not blocks.is_cuda:
        start = time.process_time()
        build(blocks, cfg)
        return time.process_time() - start
    torch.cuda.synchronize()
    start = time.perf_counter()
    build(blocks, cfg)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def lower_bound(ratios: list[float]) -> float:
    """Lower 99 % confidence bound of the geometric mean of the blocks' ratios."""
    logs = [math.log(r) for r in ratios]
    margin = T_99 * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(statistics.fmean(logs) - margin)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_v2_performance_improvement(
    shape: tuple[int, int, int], record_property: Callable[[str, object], None]
) -> None:
    """Parity first; then v1 and v2 in alternated blocks, and the ratio's bound above 1."""
    batch, seq_len, n_sel = shape
    cfg = NSAConfig(n_sel=n_sel, l_sel=16, l=16, d=16)
    blocks = _selection(batch, seq_len, cfg)
    assert torch.equal(ranges_v1(blocks, cfg), ranges_v2(blocks, cfg)), "no parity: no race"
    ratios = []
    for block in range(BLOCKS):
        # Each order equally often, so that a drift favors neither.
        order = (ranges_v1, ranges_v2) if block % 2 else (ranges_v2, ranges_v1)
        taken = {build: min(_seconds(build, blocks, cfg) for _ in range(3)) for build in order}
        ratios.append(taken[ranges_v1] / taken[ranges_v2])
    bound = lower_bound(ratios)
    record_property("v1_over_v2_ratio", round(statistics.geometric_mean(ratios), 3))
    record_property("v1_over_v2_ratio_lower_99", round(bound, 3))
    record_property("blocks", BLOCKS)
    assert bound > 1.0, f"v2 is not faster than v1: ratios {[round(r, 2) for r in ratios]}"


def test_the_bound_refuses_noise() -> None:
    """Made to fail on purpose: equal speeds with noise, and one lucky block, prove nothing."""
    assert lower_bound([1.1, 0.9, 1.05, 0.95, 1.0, 1.02, 0.99]) < 1.0
    assert lower_bound([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 9.0]) < 1.0
    assert lower_bound([3.1, 2.9, 3.0, 3.2, 2.8, 3.0, 3.1]) > 2.5
