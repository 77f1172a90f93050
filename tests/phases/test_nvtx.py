"""NVTX: the range is there, the trace is kept, and Python does not dominate."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from runbook.records import Outcome, Reason
from tests.phases import builder, spoil
from tests.phases.answers import (
    FINE,
    IMPOSSIBLE,
    NO_EFFECT,
    NOTHING,
    TOO_MUCH,
    WRONG,
    case,
    row,
    says,
)


def profiled(**values: Any) -> spoil.Change:
    return spoil.at("profile", **values)


def on_gpu(**values: float) -> spoil.Change:
    """What the device did in the profiled steps, changed."""
    return spoil.at("profile.gpu", **values)


# 81.92 ms a step: 8,192 tokens at 100,000 tok/s.
STEP_US = 81_920.0
CPU = {"where": builder.context("cpu")}
V1 = {"nsa.sel.ranges_v1": {"count": 9}}
WAITING = on_gpu(busy_us=2e5, idle_us=8e5, python_wait_us=7e5)
BUSY = on_gpu(busy_us=9.9e5, idle_us=1e4, python_wait_us=1e4)
WAITS_INSIDE = on_gpu(busy_us=2e5, idle_us=8e5, python_wait_us=1e5)
NOT_GATED = (Outcome.SKIPPED, Reason.NOT_GATED)


def of(what: str, change: spoil.Change, wanted: Any, *words: str, **more: Any) -> Any:
    return case("nvtx", what, change, wanted, *words, **more)


def top(name: str, share: float, **more: Any) -> spoil.Change:
    return profiled(
        top_python=[{"name": "a", "share": 0.01}, {"name": name, "share": share}], **more
    )


@pytest.mark.parametrize("holds", [
    of("range_present", profiled(ranges=V1), WRONG),
    of("range_present", profiled(ranges={}), NO_EFFECT),
    of("range_present", spoil.without_effect("NSA_NVTX"), NO_EFFECT),
    of("range_present", spoil.parts(profile=None), NOTHING),
    of("trace_kept", spoil.parts(files={}), NOTHING),
    of("python_share", WAITING, TOO_MUCH),
    of("python_share", on_gpu(python_wait_us=4e5), IMPOSSIBLE),
    of("python_share", on_gpu(busy_us=2e6), IMPOSSIBLE),
    of("python_share", profiled(gpu=None), NOTHING),
    of("python_share", profiled(steps=None), NOTHING),
    of("python_share", on_gpu(idle_us=math.nan), NOTHING),
    # Waiting inside operators is not waiting for Python.
    of("python_share", WAITS_INSIDE, FINE, "Python has 12%"),
    # On a CPU it is the share of the time.
    of("python_share", profiled(python_share=1.2), IMPOSSIBLE, **CPU),
    of("python_share", profiled(python_share=-0.2), IMPOSSIBLE, **CPU),
    of("python_share", profiled(python_share=None), NOTHING, **CPU),
    of("python_share", profiled(gpu=None), NOT_GATED, **CPU),
    of("python_hotspot", spoil.both(WAITING, top("sequential_prefill", 0.4)), TOO_MUCH,
       "sequential_prefill: 40%", remedy="NSA_PREFILL_BATCHED=1"),
    of("python_hotspot", profiled(top_python=[]), NOTHING),
])  # fmt: skip
def test_nvtx_rows(holds: Callable[[], None]) -> None:
    holds()


@pytest.mark.parametrize("what", ["python_share", "python_hotspot"])
def test_host_time_that_the_gpu_does_not_wait_for_costs_nothing(what: str) -> None:
    """Launching takes Python 44 % of the host's time, and the GPU is busy all the same."""
    says(row("nvtx", what, spoil.both(BUSY, top("loop", 0.4, python_share=0.44))), FINE)


def test_what_the_profiler_itself_costs_is_not_pythons() -> None:
    """Half of a profiled step is idle, and hardly any of an ordinary one."""
    us = {"window_us": 20.0, "busy_us": 9.5, "idle_us": 10.5, "python_wait_us": 10.5}
    profiler = on_gpu(**{name: steps * STEP_US for name, steps in us.items()})
    text = "busy 77.8 ms of 81.9 ms; of the rest Python has 100%"
    check = says(row("nvtx", "python_share", profiler), FINE, text)
    assert check.measurement.value == pytest.approx(0.05)
