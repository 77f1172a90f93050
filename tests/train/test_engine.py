"""The learning rate, a lack of memory, how a step is timed, and what a start loads."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

from nsa.step.clock import StepClock
from nsa.step.dispatch import is_out_of_memory
from nsa.step.optimizer import learning_rate
from tests.train.launching import environment


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


def test_start_up_loads_only_what_is_used() -> None:
    code = (
        "import sys, nsa.train.session\n"
        "heavy = {'tensorboard', 'datasets', 'tiktoken', 'pyarrow', 'pandas', 'scipy', 'rich'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment({}), capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]", done.stderr
