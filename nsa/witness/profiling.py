"""`--profile-steps N`: a Chrome trace of N steps, time per range, and the share of Python."""

from __future__ import annotations

import cProfile
import gzip
import pstats
import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nsa.contract import PROFILE_JSON, TRACE_FILE, Event, Phase
from nsa.launch.output import Heartbeat, write_json
from nsa.launch.plan import PROFILE_WARMUP_STEPS

_OPERATORS = ("aten::", "c10d::", "gloo:", "nccl:", "nsa::", "torch::", "cuda", "cuLaunch")
# Kinds of events: on the host's timeline; work on a device's (kernels, copies); and a range of the
# host's as it shows on a device's, from its first to its last kernel.
HOST, WORK, DEVICE_RANGE = "host", "work", "device_range"
_TOP = 10
_COPY_BYTES = 1 << 20
_SETTLE_S = 0.1


def torch_profiler(device_type: str) -> Any:
    """torch's profiler of the host's operators and of a device's work, for one `with`.

    It is the one below `torch.profiler.profile`, which adds cycles: that one warns in torch 2.11
    that events are cleared between cycles, even where there is one, and the `acc_events` that
    would silence it builds a Python list of all events at the end, which takes minutes.
    """
    from torch.autograd.profiler import profile

    return profile(use_kineto=True, use_device="cuda" if device_type == "cuda" else None)


class StepProfiler:
    """Watches the steps of rank 0: N under torch's profiler, then one under Python's.

    Python's profiler runs apart, in the step after, because it slows the very code that it
    measures; it only ranks functions.
    """

    def __init__(self, run_dir: Path, steps: int, device_type: str, heartbeat: Heartbeat) -> None:
        self.run_dir, self.steps, self.device_type = run_dir, steps, device_type
        # Of both profilers, once they are done.
        self.summary: dict[str, Any] | None = None
        self._beat, self._done = heartbeat, 0
        self._torch: Any = None
        self._traced: dict[str, Any] = {}
        self._python: cProfile.Profile | None = None

    @property
    def active(self) -> bool:
        """Is torch's profiler running now?"""
        return self._torch is not None

    def before_step(self) -> bool:
        """Start a profiler if its steps begin now; says whether that took time."""
        if self._done == PROFILE_WARMUP_STEPS:
            self._torch = torch_profiler(self.device_type)
            self._torch.__enter__()
            self._beat.write(Event.PROFILER, active=True)
            return True
        if self._done == PROFILE_WARMUP_STEPS + self.steps:
            self._python = cProfile.Profile()
            self._python.enable()
        return False

    def after_step(self) -> bool:
        """Count a step, and close what ends with it; says whether that took time."""
        self._done += 1
        if self.active and self._done == PROFILE_WARMUP_STEPS + self.steps:
            # Many events take a while to write.
            self._beat.phase = Phase.PROFILE
            self._beat.write(Event.PROFILE_SAVE)
            # gloo's thread may still be inside the record of a collective that has just ended;
            # closing the profiler under it corrupts the heap.
            time.sleep(_SETTLE_S)
            self._torch.__exit__(None, None, None)
            save_trace(self._torch, self.run_dir / TRACE_FILE)
            self._traced = summarize(recorded(self._torch), self.steps)
            self._torch = None
        elif self._python is not None:
            self._python.disable()
            self.summary = {**self._traced, "top_python": top_functions(self._python)}
            write_json(self.run_dir / PROFILE_JSON, self.summary)
            self._python = None
        else:
            return False
        self._beat.phase = Phase.STEP
        self._beat.write(Event.PROFILER, active=False)
        return True


class Recorded(NamedTuple):
    """One event of the profiler: times in microseconds, `kind` one of the three above."""

    begin_us: float
    end_us: float
    name: str
    kind: str


def recorded(profiler: Any) -> list[Recorded]:
    """What the profiler recorded, as Kineto has it.

    torch's own list of the same events (`profiler.function_events`) is built in Python, 0.1 ms for
    each of them: minutes for ten steps of many small operators.
    """
    return [
        Recorded(event.start_ns() / 1000, event.end_ns() / 1000, event.name(), _kind(event))
        for event in profiler.kineto_results.events()
    ]


def _kind(event: Any) -> str:
    """From what an event of torch 2.11 says too; only later ones have Kineto's own word for it."""
    if event.device_type().name == "CPU":
        return HOST
    return DEVICE_RANGE if event.is_user_annotation() else WORK


def save_trace(profiler: Any, path: Path) -> None:
    """Write the Chrome trace, compressed for speed: torch itself takes ten times as long."""
    plain = path.with_suffix("")
    profiler.export_chrome_trace(str(plain))
    with plain.open("rb") as source, gzip.open(path, "wb", compresslevel=1) as target:
        shutil.copyfileobj(source, target, _COPY_BYTES)
    plain.unlink()


def summarize(events: Sequence[Recorded], steps: int) -> dict[str, Any]:
    """Times per `nsa.` range, the share of wall time outside every operator, and the device's."""
    own = [event for event in events if event.kind == HOST]
    begin = min((event.begin_us for event in own), default=0.0)
    wall_us = max((event.end_us for event in own), default=0.0) - begin
    inside = covered((e.begin_us, e.end_us) for e in own if e.name.startswith(_OPERATORS))
    share = 1 - inside / wall_us if wall_us else 0.0
    return {
        "ranges": _ranges(events),
        "python_share": round(min(1.0, max(0.0, share)), 4),
        "steps": steps,
        "wall_us": round(wall_us, 1),
        "gpu": _device_time(events),
    }


def _device_time(events: Sequence[Recorded]) -> dict[str, float] | None:
    """From the first to the last work on the device: how long it was busy, and what it waited for.

    It waits for Python where it is idle and no thread of the host is inside an operator. None if
    nothing ran on a device.
    """
    work = [(e.begin_us, e.end_us) for e in events if e.kind == WORK]
    if not work:
        return None
    begin, end = min(span[0] for span in work), max(span[1] for span in work)
    host = [
        (max(begin, e.begin_us), min(end, e.end_us))
        for e in events
        if e.kind == HOST
        and e.name.startswith(_OPERATORS)
        and e.end_us > begin
        and e.begin_us < end
    ]
    window, busy = end - begin, covered(work)
    return {
        "window_us": round(window, 1),
        "busy_us": round(busy, 1),
        "idle_us": round(window - busy, 1),
        "python_wait_us": round(window - covered([*work, *host]), 1),
    }


def _ranges(events: Sequence[Recorded]) -> dict[str, dict[str, float]]:
    """Count and host time of each range, and from its first to its last kernel on the device."""
    ranges: dict[str, dict[str, float]] = {}
    for event in events:
        if not event.name.startswith("nsa."):
            continue
        row = ranges.setdefault(event.name, {"count": 0, "cpu_us": 0.0, "cuda_us": 0.0})
        on_device = event.kind != HOST
        row["count"] += not on_device
        row["cuda_us" if on_device else "cpu_us"] += event.end_us - event.begin_us
    return {
        name: {kind: round(number, 1) for kind, number in row.items()}
        for name, row in ranges.items()
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
