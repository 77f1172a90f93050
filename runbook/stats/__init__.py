"""Statistics of one training.csv, with window and provenance, and decisions at a declared error.

What enters is pure (no files, no clock, no randomness) and has its error rate on the page of
statistics; one value is the throughput of one block or launch, tokens over time, no mean of rates.
"""

from __future__ import annotations

from runbook.stats.arms import best_arm, best_arm_sequential, complete_rounds
from runbook.stats.cpu_time import per_cpu_second
from runbook.stats.decision import Decided, Decision
from runbook.stats.launches import launch_bounds, meets_target, scaling, scaling_over
from runbook.stats.memory import memory_plateau
from runbook.stats.pairs import faster, non_inferiority, regression
from runbook.stats.plans import (
    AA_PLAN,
    BUCKET_LAUNCHES_PLAN,
    BUCKET_PLAN,
    FASTER_PLAN,
    FUSED_LAUNCHES_PLAN,
    FUSED_PLAN,
    REGRESSION_PLAN,
    SCALING_PLAN,
    TARGET_PLAN,
    InterimPlan,
    balanced_rounds,
)
from runbook.stats.steady import steady
from runbook.stats.throughput import (
    MissingColumn,
    StatisticsError,
    WindowTooShort,
    block_step_times,
    block_throughputs,
    effective,
    last_window,
    measured_rows,
    step_times,
    time_lost,
    typical,
    warmup_cut,
)

__all__ = [
    "AA_PLAN",
    "BUCKET_LAUNCHES_PLAN",
    "BUCKET_PLAN",
    "FASTER_PLAN",
    "FUSED_LAUNCHES_PLAN",
    "FUSED_PLAN",
    "REGRESSION_PLAN",
    "SCALING_PLAN",
    "TARGET_PLAN",
    "Decided",
    "Decision",
    "InterimPlan",
    "MissingColumn",
    "StatisticsError",
    "WindowTooShort",
    "balanced_rounds",
    "best_arm",
    "best_arm_sequential",
    "block_step_times",
    "block_throughputs",
    "complete_rounds",
    "effective",
    "faster",
    "last_window",
    "launch_bounds",
    "measured_rows",
    "meets_target",
    "memory_plateau",
    "non_inferiority",
    "per_cpu_second",
    "regression",
    "scaling",
    "scaling_over",
    "steady",
    "step_times",
    "time_lost",
    "typical",
    "warmup_cut",
]
