"""The learning rate, a lack of memory, how a step is timed, and what a start loads."""

from __future__ import annotations

import math
import subprocess
import sys
import time

import pytest
import torch

from nsa.kernels.dispatch import is_out_of_memory
from nsa.step.clock import StepClock
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


def test_the_clock_splits_a_step_into_parts_and_the_hosts_own_time() -> None:
    clock = StepClock(torch.device("cpu"))
    clock.restart()
    with clock.part("fetch"):
        time.sleep(0.03)
    time.sleep(0.05)
    mark = clock.tick()
    assert mark.seconds() == pytest.approx(0.08, abs=0.03)
    assert mark.fetch_s == pytest.approx(0.03, abs=0.02)
    assert mark.host_s == pytest.approx(mark.seconds() - mark.fetch_s, abs=1e-3)


def test_restart_leaves_out_what_came_before() -> None:
    clock = StepClock(torch.device("cpu"))
    time.sleep(0.1)
    restarted = time.perf_counter()
    clock.restart()
    assert clock.tick().seconds() <= time.perf_counter() - restarted


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
