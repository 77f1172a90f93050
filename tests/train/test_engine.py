"""The learning rate, step by step, and what counts as a lack of memory."""

from __future__ import annotations

import math

import pytest
import torch

from nsa.kernels.dispatch import is_out_of_memory
from nsa.train.optimizer import learning_rate


def rate(step: int, shape: str = "cosine") -> float:
    return learning_rate(step, peak=1.0, warmup_steps=10, total_steps=110, shape=shape)


def test_warm_up_is_linear_in_optimizer_steps() -> None:
    assert [rate(step) for step in (1, 5, 10)] == pytest.approx([0.1, 0.5, 1.0])


def test_cosine_falls_to_a_tenth_at_the_last_step() -> None:
    assert rate(60) == pytest.approx(0.55)
    assert rate(110) == pytest.approx(0.1) == rate(500)
    assert rate(35) == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi / 4)))


def test_constant_stays() -> None:
    assert rate(110, "constant") == 1.0


def test_no_warm_up_starts_at_the_peak() -> None:
    found = learning_rate(1, peak=2.0, warmup_steps=0, total_steps=1000, shape="cosine")
    assert found == pytest.approx(2.0, rel=1e-4)


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("No available kernel. Aborting execution."), False),
        (ValueError("out of memory"), False),
    ],
)
def test_a_lack_of_memory_is_told_from_other_errors(error: Exception, memory: bool) -> None:
    assert is_out_of_memory(error) is memory
