"""Statistics of one training.csv, each with its window, sample size, file and digest."""

from __future__ import annotations

from runbook.stats.throughput import (
    block_throughputs,
    effective,
    last_window,
    stall,
    step_times,
    typical,
)
from runbook.stats.warmup import warmup_cut
from runbook.stats.window import MissingColumn, StatisticsError, WindowTooShort, measured_rows

__all__ = [
    "MissingColumn",
    "StatisticsError",
    "WindowTooShort",
    "block_throughputs",
    "effective",
    "last_window",
    "measured_rows",
    "stall",
    "step_times",
    "typical",
    "warmup_cut",
]
