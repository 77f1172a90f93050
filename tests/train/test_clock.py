"""How a step is timed."""

from __future__ import annotations

import time

import pytest
import torch

from nsa.train.clock import StepClock


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
