"""A profiler's trace of a rehearsed launch, as Kineto writes it, and its summary."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rehearsal.machine import Machine
from benchmarks.rehearsal.roofline import HOST_S, OPERATORS
from benchmarks.rehearsal.steps import PROFILED_HOST, Job, Steps
from nsa.contract import PROFILE_JSON, TRACE_FILE

# Operators of the trace that stand for the 2,400 of a micro-batch, and what a layer's ranges are.
_SHOWN = 60
_RANGES = (
    "nsa.cmp",
    "nsa.sel.scores",
    "nsa.sel.ranges_v2",
    "nsa.sel.attend",
    "nsa.win",
    "nsa.gate",
)
# Of the host's time in a micro-batch: outside every operator, so in Python.
_PYTHON = 0.38
_TOP = (
    ("layer.py:88:forward", 0.046),
    ("api.py:131:attend", 0.041),
    ("module.py:1747:_call", 0.038),
)


def write_profile(folder: Path, machine: Machine, job: Job, steps: Steps) -> None:
    """trace_rank0.json.gz as Kineto writes it, and profile_rank0.json computed from its events."""
    first = 5
    device = float(np.mean(steps.busy[20:, 0] * steps.dt_s[20:])) / job.accumulation
    host = HOST_S * machine.trains(0).host * PROFILED_HOST
    events: list[dict[str, Any]] = []
    now = 0.0
    for _ in range(job.profiled * job.accumulation):
        events += _micro_batch(now, host * 1e6, device * 1e6)
        now += max(host, device) * 1e6 + 5.0
    trace = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": machine.card.name}],
        "traceEvents": events,
        "displayTimeUnit": "ms",
    }
    with gzip.open(folder / TRACE_FILE, "wt", compresslevel=1, encoding="utf-8") as out:
        json.dump(trace, out)
    summary = _summary(events, job.profiled)
    summary["first_step"] = first + 1
    (folder / PROFILE_JSON).write_text(json.dumps(summary), encoding="utf-8")


def _micro_batch(begin: float, host_us: float, device_us: float) -> list[dict[str, Any]]:
    """Operators on the host, kernels that follow them on stream 7; the kernels queue up."""
    events = []
    each, kernel = host_us / _SHOWN, device_us / _SHOWN
    free = begin
    for number in range(_SHOWN):
        start = begin + number * each
        name = f"aten::mm.{number % 7}" if number % 5 else "aten::_fused_sdp_choice"
        events.append(_event("cpu_op", name, start, each * (1 - _PYTHON), pid=1, tid=1))
        launch = start + each * 0.3
        events.append(_event("cuda_runtime", "cudaLaunchKernel", launch, 4.0, pid=1, tid=1,
                             args={"correlation": number}))  # fmt: skip
        free = max(free, launch + 6.0)
        events.append(_event("kernel", f"ampere_bf16_s16816gemm_{number % 7}", free, kernel,
                             pid=0, tid=7, args={"correlation": number, "stream": 7}))  # fmt: skip
        free += kernel
        if number % 10 == 0:
            name = _RANGES[number // 10 % len(_RANGES)]
            events.append(_event("user_annotation", name, start, each, pid=1, tid=1))
            events.append(_event("gpu_user_annotation", name, free - kernel, kernel, pid=0, tid=7))
    return events


def _event(kind: str, name: str, ts: float, dur: float, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "ts": round(ts, 3), "dur": round(dur, 3), **more}


def _summary(events: Sequence[Mapping[str, Any]], steps: int) -> dict[str, Any]:
    """What the trainer's summary says of such a trace: unions of intervals, by kind."""
    spans: dict[str, list[tuple[float, float]]] = {}
    ranges: dict[str, dict[str, float]] = {}
    for event in events:
        span = (event["ts"], event["ts"] + event["dur"])
        spans.setdefault(event["cat"], []).append(span)
        if event["name"].startswith("nsa."):
            row = ranges.setdefault(event["name"], {"count": 0, "cpu_us": 0.0, "cuda_us": 0.0})
            on_gpu = event["cat"] == "gpu_user_annotation"
            row["count"] += not on_gpu
            row["cuda_us" if on_gpu else "cpu_us"] += round(event["dur"], 1)
    kernels, host = spans["kernel"], [*spans["cpu_op"], *spans["cuda_runtime"]]
    window = max(end for _, end in kernels) - kernels[0][0]
    wall = max(end for _, end in host) - host[0][0]
    inside = [(max(a, kernels[0][0]), b) for a, b in host if b > kernels[0][0]]
    busy = _union(kernels)
    return {
        "ranges": ranges,
        "python_share": round(1 - _union(host) / wall, 4),
        "top_python": [{"name": name, "share": share} for name, share in _TOP],
        "steps": steps,
        "wall_us": round(wall, 1),
        "gpu": {
            "window_us": round(window, 1),
            "busy_us": round(busy, 1),
            "idle_us": round(window - busy, 1),
            "python_wait_us": round(max(0.0, window - _union([*kernels, *inside])), 1),
        },
        "operators_shown": f"{_SHOWN} stand for {OPERATORS}",
    }


def _union(spans: Sequence[tuple[float, float]]) -> float:
    total, reached = 0.0, -math.inf
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
