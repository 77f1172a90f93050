"""Where the time of an arm of `attention_gpu` goes: its kernels on the device, one by one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.attention.checks import Arm
from benchmarks.attention.times import both
from benchmarks.program import markdown_table

# Forward and backward passes under the profiler; the table has means of one.
_PASSES = 3
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
