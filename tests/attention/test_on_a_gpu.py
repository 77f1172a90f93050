"""What only a device can show: its kernels compute the equations, and a real step never waits."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch

from nsa.attention import attend
from nsa.config import NSAConfig, Way
from nsa.data import Batch
from nsa.witness.self_test import measure, self_test
from tests.attention.test_step_on_cuda import production

PRODUCTION_SHAPE = (12, 2, 64)
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "triton", "shape", "seq_len"),
    [
        # By SDPA's kernels of float32; those of bf16 are in `test_proofs_on_device`, each.
        *((F32, False, PRODUCTION_SHAPE, length) for length in (512, 2048, 2050)),
        # All three branches, the choice of blocks and the gates by Triton.
        *(
            (dtype, True, PRODUCTION_SHAPE, length)
            for dtype in (F16, BF16)
            for length in (1, 31, 512, 4096)
        ),
        # One head in a group, many, and widths that are padded.
        *(
            (BF16, True, shape, 2048)
            for shape in ((8, 1, 64), (4, 4, 64), (16, 2, 128), (12, 2, 128), (5, 1, 48))
        ),
    ],
    ids=str,
)
def test_kernels_compute_the_equations(
    dtype: torch.dtype, triton: bool, shape: tuple[int, int, int], seq_len: int
) -> None:
    heads, groups, width = shape
    cfg = NSAConfig(
        dim=heads * width, n_heads=heads, n_kv_groups=groups, d_k=width, d_v=width
    )  # fmt: skip
    way = Way(force_sdpa=True, kernels="triton" if triton else "masked")
    run = partial(attend, cfg=cfg, way=way)
    assert measure(run, cfg, seq_len, dtype=dtype, device=torch.device("cuda")).problems == []


@pytest.mark.gpu
def test_the_self_test_takes_seconds_and_finds_nothing() -> None:
    """As the trainer runs it: the kernels that `auto` wants agree, and nothing is left behind."""
    engine = production(NSA_USE_TRITON_SEL="auto")
    before = torch.cuda.get_rng_state(), torch.get_rng_state()
    found = self_test(engine)
    assert [name for name, one in found.paths.items() if one.problems] == []
    assert list(found.paths) == ["triton"], "the Triton kernels are not used on this device"
    assert sum(one.seconds for one in found.paths.values()) < 60
    assert torch.equal(torch.cuda.get_rng_state(), before[0])
    assert torch.equal(torch.get_rng_state(), before[1])


@contextmanager
def every_wait_raises() -> Iterator[None]:
    """CUDA raises at each synchronization. torch warns, once, that it may overlook some."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("asked", ["0", "1"])
def test_a_real_step_never_waits(asked: str, precision: None) -> None:
    """CUDA itself raises at every synchronization of the second step."""
    engine = production(NSA_USE_TRITON_SEL=asked)
    engine.dispatch.barred.clear()
    engine.configure(engine.plan.toggles)
    batches = [Batch(tokens=torch.randint(256, (1, 2049))) for _ in range(2)]
    for number, mode in ((1, nullcontext), (2, every_wait_raises)):
        with mode():
            engine.compute(batches)
            engine.update(number)
