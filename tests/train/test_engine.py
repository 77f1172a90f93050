"""The learning rate, a lack of memory, and how a step is timed."""

from __future__ import annotations

import math

import pytest
import torch

from nsa.step.clock import StepClock
from nsa.step.dispatch import is_out_of_memory
from nsa.step.optimizer import learning_rate


@pytest.mark.parametrize(
    ("step", "shape", "warmup", "wanted"),
    [
        # Warm-up is linear in optimizer steps; cosine falls to a tenth at the last one.
        (1, "cosine", 10, 0.1),
        (5, "cosine", 10, 0.5),
        (10, "cosine", 10, 1.0),
        (35, "cosine", 10, 0.1 + 0.45 * (1 + math.cos(math.pi / 4))),
        (60, "cosine", 10, 0.55),
        (110, "cosine", 10, 0.1),
        (500, "cosine", 10, 0.1),
        (110, "constant", 10, 1.0),
        (1, "cosine", 0, 0.1 + 0.45 * (1 + math.cos(math.pi / 110))),
    ],
)
def test_the_rate_of_a_step(step: int, shape: str, warmup: int, wanted: float) -> None:
    found = learning_rate(step, peak=2.0, warmup_steps=warmup, total_steps=110, shape=shape)
    assert found == pytest.approx(2 * wanted)


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


def clock_that_reads(monkeypatch: pytest.MonkeyPatch, *readings: float) -> StepClock:
    """The clock of a step on a CPU, whose host reads these seconds, one after the other."""
    monkeypatch.setattr("nsa.step.clock.perf_counter", iter(readings).__next__)
    return StepClock(torch.device("cpu"))


def test_the_clock_tells_a_step_and_what_of_it_waited_for_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = clock_that_reads(monkeypatch, 100.0, 100.25, 100.75, 102.0, 105.0)
    with clock.fetching():
        pass
    mark = clock.tick()
    assert (mark.seconds(), mark.fetch_s) == (2.0, 0.5)
    following = clock.tick()  # begins where the one before ended, and fetches nothing
    assert (following.seconds(), following.fetch_s) == (3.0, 0.0)


def test_restart_leaves_out_what_came_before(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = clock_that_reads(monkeypatch, 100.0, 101.0, 104.0, 110.0, 110.5)
    with clock.fetching():
        pass
    clock.restart()
    mark = clock.tick()
    assert (mark.seconds(), mark.fetch_s) == (0.5, 0.0)
