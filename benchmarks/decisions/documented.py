"""The hand-written runbook's rules, as it states them, to be measured beside ours."""

from __future__ import annotations

import numpy as np

from benchmarks.decisions.noise import FloatArray

__all__ = ["halves_differ", "keep_fused", "last_50", "level_memory", "single_above_ddp"]


def last_50(step_times: FloatArray) -> FloatArray:
    """Mean of the rates of the last 50 rows, per run: the runbook's statistic."""
    means: FloatArray = (1.0 / step_times[:, -50:]).mean(axis=1)
    return means


def keep_fused(baseline: FloatArray, fused: FloatArray) -> FloatArray:
    """Keep if the mean of the last 50 rows is not below the baseline's."""
    return last_50(fused) >= last_50(baseline)


def level_memory(mib: FloatArray) -> FloatArray:
    """The usual reading of "memory plateau": the last value is at most 1 % above the first."""
    return mib[:, -1] <= 1.01 * mib[:, 0]


def single_above_ddp(single: FloatArray, ddp: FloatArray, n: int) -> FloatArray:
    """One device is faster than each device of the distributed run."""
    return single > ddp / n


def halves_differ(step_times: FloatArray) -> FloatArray:
    """A two-sample t-test on steps, as if they were independent: unsteady at |t| > 1.96."""
    half = step_times.shape[1] // 2
    first, last = step_times[:, :half], step_times[:, half:]
    error = np.sqrt(first.var(axis=1, ddof=1) / half + last.var(axis=1, ddof=1) / half)
    return np.abs(last.mean(axis=1) - first.mean(axis=1)) / error > 1.96
