"""How long an arm of `attention_gpu` takes, in which kernels, and what memory it holds.

On a GPU the passes are recorded as CUDA graphs and replayed: launched one by one, the host would be
what is measured up to some thousand tokens, and training replays its layers too.
"""

from __future__ import annotations

import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.attention.checks import Arm
from benchmarks.program import markdown_table

# The first runs of an arm load kernels and choose algorithms.
_WARM = 2
# Passes of which a time is the mean, or the median.
_PASSES = 3


def both(arm: Arm) -> None:
    """A forward and a backward pass; a peer may leave some of its inputs out."""
    out, leaves = arm()
    torch.autograd.grad(out, list(leaves), out.detach(), allow_unused=True)


@dataclass(frozen=True, kw_only=True)
class Timed:
    """An arm that is ready to be timed; by_host_s: forward and backward, launched one by one.

    replayed: False where only that can be timed.
    """

    forward: Callable[[], object]
    both: Callable[[], object]
    by_host_s: float | None
    replayed: bool

    def once(self, device: str) -> tuple[float, float]:
        """Seconds of a forward and of a backward pass, on a GPU means of a few."""
        if device == "cpu":
            begin = time.process_time()
            self.forward()
            middle = time.process_time()
            self.both()
            forward_s = middle - begin
            return forward_s, time.process_time() - middle - forward_s
        forward_s = _device_s(self.forward, _PASSES)
        return forward_s, _device_s(self.both, _PASSES) - forward_s


def _device_s(run: Callable[[], object], times: int) -> float:
    """Seconds of one run on the device, a mean."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / times / 1e3


def timed(arm: Arm, device: str, *, may_launch: bool) -> Timed:
    """Warmed up, and recorded on a GPU; may_launch: launched where it cannot be recorded.

    Raises RuntimeError where it cannot run, or has to be recorded and cannot.
    """
    for _ in range(_WARM):
        both(arm)
    if device == "cpu":
        return Timed(forward=arm, both=lambda: both(arm), by_host_s=None, replayed=False)
    by_host_s = statistics.median(_device_s(lambda: both(arm), 1) for _ in range(_PASSES))
    try:
        forward, whole = _recorded(arm)
    except RuntimeError:
        if not may_launch:
            raise
        return Timed(forward=arm, both=lambda: both(arm), by_host_s=by_host_s, replayed=False)
    return Timed(forward=forward.replay, both=whole.replay, by_host_s=by_host_s, replayed=True)


def _recorded(arm: Arm) -> tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph]:
    """A forward pass, and both. As torch asks for it, they ran on another stream before."""
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        both(arm)
    torch.cuda.current_stream().wait_stream(beside)
    forward, whole = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(forward):
        arm()
    with torch.cuda.graph(whole):
        both(arm)
    return forward, whole


def peak_bytes(arm: Arm, device: str) -> int | None:
    """What one forward and backward pass holds at most beyond its inputs; None on a CPU."""
    if device == "cpu":
        return None
    both(arm)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    both(arm)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


# Kernels that take less than this share of an arm's time are one line together.
_LEAST = 0.01
# Template arguments and signatures, which fill lines and tell no kernel from another.
_NOISE = re.compile(r"<.*|\(.*|^void ")


def breakdown(arm: Arm) -> list[dict[str, Any]]:
    """Milliseconds and launches of each kernel in a forward and backward pass, longest first.

    The profiler's own time is none of the device's: these are the kernels' own durations.
    """
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(_PASSES):
            both(arm)
        torch.cuda.synchronize()
    spent: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for event in profiler.key_averages():
        if event.self_device_time_total > 0:
            name = _NOISE.sub("", event.key)
            spent[name] += event.self_device_time_total
            launches[name] += event.count
    return [
        {"kernel": name, "ms": us / 1e3 / _PASSES, "launches": launches[name] / _PASSES}
        for name, us in spent.most_common()
    ]


def kernel_table(rows: Sequence[dict[str, Any]]) -> str:
    """In Markdown: all arms that have a breakdown."""
    cells: list[tuple[object, ...]] = []
    for row in rows:
        kernels = row.get("kernels", [])
        whole = sum(kernel["ms"] for kernel in kernels)
        head = (row["shape"], row["seq_len"], row["arm"])
        small = [kernel for kernel in kernels if kernel["ms"] < _LEAST * whole]
        shown = [kernel for kernel in kernels if kernel not in small]
        if small:
            together = {key: sum(kernel[key] for kernel in small) for key in ("ms", "launches")}
            shown.append({"kernel": f"{len(small)} others", **together})
        for kernel in shown:
            share = f"{kernel['ms'] / whole:.0%}"
            figures = (f"{kernel['ms']:.4f}", share, f"{kernel['launches']:g}")
            cells.append((*head, kernel["kernel"], *figures))
    header = ("shape", "S", "arm", "kernel", "ms", "share", "launches")
    return markdown_table(header, cells) if cells else ""
