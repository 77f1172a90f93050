"""NVTX: the range is there, the trace is kept, and Python does not dominate."""

from __future__ import annotations

import math
from typing import Any

import pytest

from runbook.records import Outcome, Reason
from runbook.records.evidence import LaunchEvidence
from tests.phases import builder, spoil
from tests.phases.answers import IMPOSSIBLE, NO_EFFECT, NOTHING, TOO_MUCH, WRONG, row, said


def profiled(**values: Any) -> spoil.Change:
    return spoil.inside("profile", **values)


def on_gpu(**values: float) -> spoil.Change:
    """What the device did in the profiled steps, changed."""

    def change(made: LaunchEvidence) -> LaunchEvidence:
        return profiled(gpu={**made.profile["gpu"], **values})(made)

    return change


V1 = {"ranges": {"nsa.sel.ranges_v1": {"count": 9}}}


WAITING = on_gpu(busy_us=2e5, idle_us=8e5, python_wait_us=7e5)
ONE_LOOP = profiled(top_python=[{"name": "loop", "share": 0.5}])


@pytest.mark.parametrize(
    ("what", "change", "expected"),
    [
        ("range_present", profiled(**V1), WRONG),
        ("range_present", profiled(ranges={}), NO_EFFECT),
        ("range_present", spoil.without_effect("NSA_NVTX"), NO_EFFECT),
        ("range_present", spoil.parts(profile=None), NOTHING),
        ("trace_kept", spoil.parts(files={}), NOTHING),
        ("python_share", WAITING, TOO_MUCH),
        ("python_share", on_gpu(python_wait_us=4e5), IMPOSSIBLE),
        ("python_share", on_gpu(busy_us=2e6), IMPOSSIBLE),
        ("python_share", profiled(gpu=None), NOTHING),
        ("python_share", profiled(steps=None), NOTHING),
        ("python_share", on_gpu(idle_us=math.nan), NOTHING),
        ("python_hotspot", spoil.both(WAITING, ONE_LOOP), TOO_MUCH),
        ("python_hotspot", profiled(top_python=[]), NOTHING),
    ],
)
def test_nvtx_rows(what: str, change: spoil.Change, expected: tuple[Outcome, Reason]) -> None:
    assert row("nvtx", what).outcome is Outcome.PASS
    assert said(row("nvtx", what, change)) == expected


CPU = builder.context("cpu")
# 81.92 ms a step: 8,192 tokens at 100,000 tok/s.
STEP_US = 81_920.0


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (profiled(python_share=1.2), IMPOSSIBLE),
        (profiled(python_share=-0.2), IMPOSSIBLE),
        (profiled(python_share=None), NOTHING),
        (profiled(gpu=None), (Outcome.SKIPPED, Reason.NOT_GATED)),
    ],
)
def test_on_a_cpu_it_is_the_share_of_the_time(
    change: spoil.Change, expected: tuple[Outcome, Reason]
) -> None:
    assert said(row("nvtx", "python_share", change, CPU)) == expected


def test_host_time_that_the_gpu_does_not_wait_for_costs_nothing() -> None:
    """Launching takes Python 44 % of the host's time, and the GPU is busy all the same."""
    busy = on_gpu(busy_us=9.9e5, idle_us=1e4, python_wait_us=1e4)
    top = profiled(python_share=0.44, top_python=[{"name": "loop", "share": 0.4}])
    for what in ("python_share", "python_hotspot"):
        assert row("nvtx", what, spoil.both(busy, top)).outcome is Outcome.PASS


def test_what_the_profiler_itself_costs_is_not_pythons() -> None:
    """Half of a profiled step is idle, and hardly any of an ordinary one."""
    profiler = on_gpu(
        window_us=20 * STEP_US,
        busy_us=9.5 * STEP_US,
        idle_us=10.5 * STEP_US,
        python_wait_us=10.5 * STEP_US,
    )
    check = row("nvtx", "python_share", profiler)
    assert check.outcome is Outcome.PASS and check.measurement is not None
    assert check.measurement.value == pytest.approx(0.05)
    assert "busy 77.8 ms of 81.9 ms; of the rest Python has 100%" in check.reason


def test_waiting_inside_operators_is_not_waiting_for_python() -> None:
    bound = on_gpu(busy_us=2e5, idle_us=8e5, python_wait_us=1e5)
    check = row("nvtx", "python_share", bound)
    assert check.outcome is Outcome.PASS and "Python has 12%" in check.reason


def test_the_hotspot_is_named() -> None:
    top = [{"name": "a", "share": 0.01}, {"name": "sequential_prefill", "share": 0.4}]
    check = row("nvtx", "python_hotspot", spoil.both(WAITING, profiled(top_python=top)))
    assert "sequential_prefill: 40%" in check.reason and "NSA_PREFILL_BATCHED=1" in check.remedy
