"""`--profile-steps N`: a Chrome trace of N steps, time per range, and the share of Python."""

from __future__ import annotations

import cProfile
import pstats
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nsa.contract import PROFILE_JSON, TRACE_FILE
from nsa.train.launch import PROFILE_WARMUP_STEPS
from nsa.train.output import write_json

_OPERATORS = ("aten::", "c10d::", "gloo:", "nccl:", "nsa::", "torch::", "cuda", "cuLaunch")
_TOP = 10
_SETTLE_S = 0.1


class StepProfiler:
    """Watches the steps of rank 0: N under torch's profiler, then one under Python's.

    Python's profiler runs apart, in the step after, because it slows the very code that it
    measures; it only ranks functions.
    """

    def __init__(self, run_dir: Path, steps: int, device_type: str) -> None:
        self.run_dir, self.steps, self.device_type = run_dir, steps, device_type
        self.summary: dict[str, Any] | None = None
        self.complete = False
        self._done = 0
        self._torch: Any = None
        self._python: cProfile.Profile | None = None

    @property
    def active(self) -> bool:
        """Is torch's profiler running now?"""
        return self._torch is not None

    def before_step(self) -> bool:
        """Start a profiler if its steps begin now; says whether that took time."""
        if self._done == PROFILE_WARMUP_STEPS:
            from torch.profiler import ProfilerActivity, profile

            activities = [ProfilerActivity.CPU]
            if self.device_type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._torch = profile(activities=activities)
            self._torch.__enter__()
            return True
        if self._done == PROFILE_WARMUP_STEPS + self.steps:
            self._python = cProfile.Profile()
            self._python.enable()
        return False

    def after_step(self) -> bool:
        """Count a step, and close what ends with it; says whether that took time."""
        self._done += 1
        if self._torch is not None and self._done == PROFILE_WARMUP_STEPS + self.steps:
            # gloo's thread may still be inside the record of a collective that has just ended;
            # closing the profiler under it corrupts the heap.
            time.sleep(_SETTLE_S)
            self._torch.__exit__(None, None, None)
            self._torch.export_chrome_trace(str(self.run_dir / TRACE_FILE))
            self.summary = summarize(self._torch, self.steps)
            self._torch = None
            return True
        if self._python is not None:
            self._python.disable()
            if self.summary is not None:
                self.summary["top_python"] = top_functions(self._python)
                write_json(self.run_dir / PROFILE_JSON, self.summary)
            self._python = None
            self.complete = True
            return True
        return False


def summarize(profiler: Any, steps: int) -> dict[str, Any]:
    """Times per `nsa.` range, and the share of wall time outside every operator."""
    ranges = {
        row.key: {
            "count": row.count,
            "cpu_us": round(row.cpu_time_total, 1),
            "cuda_us": round(getattr(row, "device_time_total", 0.0), 1),
        }
        for row in profiler.key_averages()
        if row.key.startswith("nsa.")
    }
    spans = [
        (event.time_range.start, event.time_range.end, event.name) for event in profiler.events()
    ]
    wall_us = max(s[1] for s in spans) - min(s[0] for s in spans) if spans else 0.0
    inside = covered((b, e) for b, e, name in spans if name.startswith(_OPERATORS))
    share = 1 - inside / wall_us if wall_us else 0.0
    return {
        "ranges": ranges,
        "python_share": round(min(1.0, max(0.0, share)), 4),
        "top_python": [],
        "steps": steps,
        "wall_us": round(wall_us, 1),
    }


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals (begin, end)."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def top_functions(profile: cProfile.Profile) -> list[dict[str, Any]]:
    """Python functions by their own time, as shares of the profiled step; built-ins left out."""
    stats: dict[tuple[str, int, str], Any] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    whole = sum(row[2] for row in stats.values()) or 1.0
    own = [
        (row[2] / whole, f"{Path(file).name}:{line}:{name}")
        for (file, line, name), row in stats.items()
        if file != "~"
    ]
    return [{"name": name, "share": round(s, 4)} for s, name in sorted(own, reverse=True)[:_TOP]]
