"""What the profile is made of, and how long it may take."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from nsa.witness.profiling import (
    DEVICE_RANGE,
    HOST,
    WORK,
    Recorded,
    StepProfiler,
    recorded,
    summarize,
    torch_profiler,
)


def event(begin: float, end: float, name: str, kind: str = HOST) -> Recorded:
    return Recorded(begin_us=begin, end_us=end, name=name, kind=kind)


STEP = [
    event(0, 100, "nsa.win"),
    event(10, 40, "aten::mm"),
    event(20, 30, "cudaLaunchKernel"),
    event(50, 60, "aten::add"),
    event(35, 95, "ampere_gemm", WORK),
    event(35, 95, "nsa.win", DEVICE_RANGE),
]


def test_a_range_counts_once_whatever_timelines_it_is_on() -> None:
    found = summarize(STEP, 1)["ranges"]
    assert found == {"nsa.win": {"count": 1, "cpu_us": 100, "cuda_us": 60}}


def test_python_is_what_is_in_no_operator_of_the_host() -> None:
    found = summarize(STEP, 1)
    assert (found["wall_us"], found["python_share"]) == (100, 0.6)
    assert summarize([], 1)["python_share"] == 0


def test_what_the_device_waits_for() -> None:
    """Idle from 95 to 120 and from 130 to 150; operators are in 97-99, 118-135 and 145-150."""
    more = [
        event(97, 99, "aten::add"),
        event(118, 135, "aten::mm"),
        event(120, 130, "gemm", WORK),
        event(122, 125, "other stream", WORK),
        event(145, 170, "aten::mm"),
        event(150, 160, "gemm", WORK),
    ]
    assert summarize([*STEP, *more], 1)["gpu"] == {
        "window_us": 125,
        "busy_us": 80,
        "idle_us": 45,
        "python_wait_us": 45 - 2 - 2 - 5 - 5,
    }
    assert summarize([STEP[1]], 1)["gpu"] is None


# How Kineto names what is on a device's timeline, where torch tells.
ON_DEVICE = {
    "kernel": WORK,
    "gpu_memcpy": WORK,
    "gpu_memset": WORK,
    "gpu_user_annotation": DEVICE_RANGE,
}


@pytest.mark.parametrize(
    ("device", "kinds"),
    [("cpu", {HOST}), pytest.param("cuda", {HOST, WORK, DEVICE_RANGE}, marks=pytest.mark.gpu)],
)
def test_kinds_are_those_of_kineto_where_torch_tells_them(device: str, kinds: set[str]) -> None:
    with torch_profiler(device) as profiler, torch.profiler.record_function("nsa.win"):
        torch.ones(64, device=device).add(1).sum().item()
    found = recorded(profiler)
    for row, own in zip(found, profiler.kineto_results.events(), strict=True):
        if hasattr(own, "activity_type"):
            assert row.kind == ON_DEVICE.get(own.activity_type(), HOST), own.activity_type()
    assert {row.kind for row in found} == kinds


@pytest.mark.parametrize(
    ("device", "annotation", "kind"),
    [
        (DeviceType.CPU, False, HOST),
        (DeviceType.CPU, True, HOST),
        (DeviceType.CUDA, False, WORK),
        (DeviceType.CUDA, True, DEVICE_RANGE),
    ],
)
def test_the_kind_of_an_event(device: DeviceType, annotation: bool, kind: str) -> None:
    """By what torch's event says of itself in the versions that do not name its kind."""
    said = {"name": "nsa.win", "device_type": device, "is_user_annotation": annotation}
    said |= {"start_ns": 1000, "end_ns": 3000}
    own = SimpleNamespace(**{name: partial(lambda it: it, value) for name, value in said.items()})
    (found,) = recorded(SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: [own])))
    assert (found.kind, found.begin_us, found.end_us) == (kind, 1.0, 3.0)


def test_the_end_of_the_profiled_steps_is_announced(tmp_path: Path) -> None:
    profiler = StepProfiler(tmp_path, 2, "cpu")
    told = []
    for _ in range(8):
        profiler.before_step()
        torch.ones(2).add(1)
        told.append((profiler.about_to_save, profiler.active))
        profiler.after_step()
    assert [saves for saves, _ in told].count(True) == 1
    last = [active for _, active in told].index(False, [s for s, _ in told].index(True) + 1)
    assert told[last - 1] == (True, True), "the step that is announced is the last profiled one"
