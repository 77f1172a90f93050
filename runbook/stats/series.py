"""The series of one run: does its speed stay where it was, and does its memory?"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from runbook.errors import UsageError
from runbook.stats import (
    MAD_TO_SIGMA,
    Decided,
    Decision,
    FloatArray,
    Values,
    between,
    positive,
    too_few,
)
from runbook.stats.arms import t_quantile, t_upper_tail
from runbook.stats.throughput import warmup_cut

# One-sided, of each bound of a slope: a 90 % interval.
ERROR = 0.05

# -- steady ----------------------------------------------------------------------------------------

# Steps per batch; fewer, down to the shortest, where the run holds fewer batches than needed.
BATCH, SHORTEST_BATCH, FEWEST_BATCHES = 50, 10, 8
# A pause is a step of more than twice the median; in the trend it counts as this much only,
# because its whole length is already judged as stall.
PAUSE_RATIO = 2.0
# A slow step is beyond so many robust deviations of the usual ones, and by so much at least.
SLOW_DEVIATIONS = 5.0
SLOW_LEAST = 0.05
CHANGE_ERROR = 0.01
SEGMENT = 3


def steady(step_times: Values, *, tolerance: float = 0.03, stall_limit: float = 0.01) -> Decision:
    """Does the step time stay level over the run?

    Steps are no independent evidence (they follow each other's pace), batches of about 50 are
    nearly so; what dependence is left between batches widens the interval.

    Args:
        step_times: seconds per step, in order, of one launch; leave out steps with an
            evaluation or a checkpoint. Warm-up is found and cut (`warmup_cut`).
        tolerance: change of step time over the whole run that is still level, as a share.
        stall_limit: share of the time that stalls may take (`stall_share`).

    Returns:
        PASS if the interval of the total slope lies inside +- tolerance, no change point is
        found and the stall share is within its limit. FAIL if the interval lies outside, a
        shift of more than the tolerance is significant at 1 % over all split points, or the
        stall share is above its limit. Else, and below 80 steps, INCONCLUSIVE. `estimate` is
        the change of step time over the run as a share.

    Raises:
        UsageError: values that are not positive numbers, limits out of range.
    """
    between("tolerance", tolerance, 0.0, 1.0)
    between("stall_limit", stall_limit, 0.0, 1.0)
    times = positive("step_times", step_times, unit="s")
    cut = warmup_cut(times)
    kept = times[cut:]
    stall = stall_share(kept)
    size = min(BATCH, max(SHORTEST_BATCH, kept.size // FEWEST_BATCHES))
    count = kept.size // size
    if count < FEWEST_BATCHES:
        needed = FEWEST_BATCHES * SHORTEST_BATCH
        return replace(too_few(kept.size, "steps after warm-up", needed), n=count)
    # Pauses are capped; the oldest odd steps are left out.
    capped = np.minimum(kept, PAUSE_RATIO * float(np.median(kept)))
    levels = np.log(capped[kept.size - count * size :].reshape(count, size).mean(axis=1))
    slope, half, factor = _total_slope(levels)
    split, shift, p = _change_point(levels, factor)
    first = cut + (kept.size - count * size) + split * size
    interval = (math.expm1(slope - half), math.expm1(slope + half))
    faults = []
    if interval[0] > tolerance or interval[1] < -tolerance:
        faults.append(f"beyond +-{tolerance:.0%}")
    if p < CHANGE_ERROR and abs(shift) > tolerance:
        faults.append(f"shift of {shift:+.1%} at step {first} (p = {p:.2g})")
    if stall > stall_limit:
        faults.append(f"stall {stall:.1%} of the time, limit {stall_limit:.1%}")
    level = -tolerance < interval[0] and interval[1] < tolerance
    trend = f"step time {math.expm1(slope):+.1%} ({interval[0]:+.1%} to {interval[1]:+.1%})"
    if faults:
        outcome, says = Decided.FAIL, "; ".join([trend, *faults])
    elif level:
        outcome, says = Decided.PASS, f"{trend}, inside +-{tolerance:.0%}; stall {stall:.1%}"
    else:
        outcome = Decided.INCONCLUSIVE
        says = f"{trend}: cannot tell whether inside +-{tolerance:.0%}; a longer run would"
    return Decision(
        outcome=outcome,
        estimate=math.expm1(slope),
        interval=interval,
        n=count,
        reason=f"{says} ({count} batches of {size} steps)",
    )


def stall_share(times: FloatArray) -> float:
    """Time in stalls as a share of all time: the one rule for what a stall is.

        stall = (sum of t over t > 2 m  +  sum of (t - m) over m (1 + s) < t <= 2 m) / sum of t

    with the median m and s = max(5 %, 5 robust deviations / m), at most 1. A step of more than
    twice the median is a pause and counts whole; a slow step counts what it lost against the
    median, so that many short stalls weigh as much as a few long ones.

    Args:
        times: seconds per step after warm-up, above 0.
    """
    middle = float(np.median(times))
    paused = times > PAUSE_RATIO * middle
    slow = _slow(times) & ~paused
    return float((times[paused].sum() + (times[slow] - middle).sum()) / times.sum())


def _slow(times: FloatArray) -> npt.NDArray[np.bool_]:
    middle = float(np.median(times))
    spread = MAD_TO_SIGMA * float(np.median(np.abs(times - middle))) / middle
    share = max(SLOW_LEAST, SLOW_DEVIATIONS * spread)
    return times > middle * (1.0 + min(share, PAUSE_RATIO - 1.0))


def _total_slope(levels: FloatArray) -> tuple[float, float, float]:
    """Total log change over the run, half-width of its interval, variance factor.

    Least squares over the batch number. The factor (1 + r) / (1 - r) makes up for dependence r
    between neighbouring batches (bias-corrected lag-1 autocorrelation of the residuals, never
    below 0).
    """
    count = levels.size
    x = np.arange(count) - (count - 1) / 2
    spread = float(x @ x)
    slope = float(x @ levels) / spread
    rest = levels - levels.mean() - slope * x
    energy = float(rest @ rest)
    lag = float(rest[1:] @ rest[:-1]) / energy if energy > 0 else 0.0
    r = min(max((count * lag + 1) / (count - 4), 0.0), 0.8)
    factor = (1 + r) / (1 - r)
    bar = math.sqrt(energy / (count - 2) / spread * factor)
    return slope * count, t_quantile(ERROR, count - 2) * bar * count, factor


def _change_point(levels: FloatArray, factor: float) -> tuple[int, float, float]:
    """The split with the most significant difference of means: its batch, the shift, and its p.

    p is corrected for all splits.
    """
    count = levels.size
    splits = np.arange(SEGMENT, count - SEGMENT + 1)
    sums, squares = np.cumsum(levels), np.cumsum(levels**2)
    left, right = sums[splits - 1] / splits, (sums[-1] - sums[splits - 1]) / (count - splits)
    within = squares[-1] - splits * left**2 - (count - splits) * right**2
    variance = np.maximum(within, 1e-18) / (count - 2) * factor
    t = np.abs(right - left) / np.sqrt(variance * (1 / splits + 1 / (count - splits)))
    best = int(np.argmax(t))
    p = min(1.0, 2 * t_upper_tail(float(t[best]), count - 2) * splits.size)
    return int(splits[best]), math.expm1(right[best] - left[best]), p


# -- memory ----------------------------------------------------------------------------------------

# At least one row for each group in the last half.
FEWEST_ROWS = 40
GROUPS = 20
SLACK_MIB = 64.0
SLACK_SHARE = 0.002
# A leak goes on: each group of the last half, but for two, lies above the one before, and by the
# slope's lower bound memory is so many times what is held now at the last step of production. In 22
# healthy launches on a CPU (44 halves) no rank rose more than 10 times, nor came to 3.5 times.
STEADY_RISES = GROUPS - 3
STEADY_FACTOR = 4.0
# The 95 % point of the normal distribution.
Z_95 = 1.6449
# glibc returns little of what is freed: the resident memory of a healthy process rises until its
# free list is long enough, measured for 600 to 4,000 steps, evenly at times, to 1.75 times what it
# had at first, while the bytes in use stay level. A leak looks the same for as long. What rises to
# this many times its first level, and in the last quarter still by this share of its pace so far,
# is no allocator's: its rise stays below the first and slows down before it ends.
LEAK_FACTOR, LEAK_PACE = 2.0, 0.5
# A last quarter with no more than this share of all growth is level; an even rise has a quarter.
LEVEL_SHARE = 0.1


def memory_plateau(steps: Values, mib: Values, project_to_step: float, limit: float) -> Decision:
    """Has the memory of one process reached its plateau?

    Args:
        steps: step numbers, rising.
        mib: memory at the end of each of these steps, MiB.
        project_to_step: last step of the production run that this run stands for.
        limit: most memory that the production run may take, MiB.

    Returns:
        FAIL if the last half sets a new high-water mark of more than max(64 MiB, 0.2 %) above
        that of the first half (of single rows, or of the median of a twentieth of them, so
        that a short spike cannot hide a leak), if the limit is already passed, if even the
        lower bound of the projection passes it, or, whatever the limit, if memory rises in
        17 of 19 parts of the last half and that bound is 4 times what is held now. PASS if none
        of this is so and the upper bound stays within the limit. Else, and below 40 rows,
        INCONCLUSIVE. The projection continues the robust slope (Theil-Sen over medians of groups
        of the last half, bounds after Sen at one-sided 95 %). `estimate` is the projected memory.

    Raises:
        UsageError: values that are not positive numbers, lengths differ, steps do not rise.
    """
    used = positive("mib", mib, unit="MiB")
    ceiling = float(positive("limit", [limit], unit="MiB")[0])
    goal = float(positive("project_to_step", [project_to_step], unit="steps")[0])
    at = _rising(steps)
    if at.size < FEWEST_ROWS:
        return too_few(at.size, "rows", FEWEST_ROWS)
    half = at.size // 2
    before, after = float(used[:half].max()), float(used[half:].max())
    slack = max(SLACK_MIB, SLACK_SHARE * before)
    slope, (low, high) = _sen_slope(at[half:], used[half:])
    now = float(np.median(used[-(at.size // GROUPS) :]))
    ahead = max(goal - float(at[-1]), 0.0)
    estimate = now + slope * ahead
    interval = (now + low * ahead, now + high * ahead)
    top = max(before, after)
    # The highest level held for a twentieth of these rows: a short spike cannot hide a leak.
    first, last = _levels(used[:half]), _levels(used[half:])
    growth = max(after - before, max(last) - max(first))
    faults = []
    if growth > slack:
        faults.append(
            f"new high-water mark in the last half: {growth:+.0f} MiB, allowed {slack:.0f} MiB"
        )
    if top > ceiling:
        faults.append(f"{top:.0f} MiB were already used, limit {ceiling:.0f} MiB")
    elif max(interval[0], top) > ceiling:
        faults.append(
            f"reaches {interval[0]:.0f} MiB or more by step {goal:g}, limit {ceiling:.0f} MiB"
        )
    rises = sum(later > one for one, later in pairwise(last))
    if rises >= STEADY_RISES and interval[0] > STEADY_FACTOR * now:
        faults.append(
            f"grows in {rises} of {GROUPS - 1} parts of the last half: at least "
            f"{interval[0] / now:.1f} times what is held now by step {goal:g}"
        )
    trend = f"{slope:+.3g} MiB/step, {estimate:.0f} MiB by step {goal:g}"
    if faults:
        outcome, says = Decided.FAIL, "; ".join([*faults, trend])
    elif interval[1] <= ceiling:
        outcome, says = Decided.PASS, f"no new high-water mark; {trend}, limit {ceiling:.0f} MiB"
    else:
        outcome = Decided.INCONCLUSIVE
        most = f"up to {interval[1]:.0f} MiB is possible, limit {ceiling:.0f} MiB"
        says = f"{trend}, but {most}; run longer"
    return Decision(
        outcome=outcome,
        estimate=estimate,
        interval=interval,
        n=at.size,
        reason=says,
        details={"slope_mib_per_step": slope},
    )


def outside_plateau(steps: Values, mib: Values, project_to_step: float, limit: float) -> Decision:
    """Has the resident memory of a trainer's processes reached its plateau?

    Args and Raises as of `memory_plateau`, whose word stands unless it is FAIL for growth alone.

    Returns:
        FAIL if the limit is already passed, or if memory came to twice its first level (the median
        of the first twentieth of the rows) and rose in the last quarter at half its pace so far
        or more. Of other growth PASS if the last quarter, by its highest twentieth, has at most a
        tenth of it and the projection's upper bound stays within the limit. Else INCONCLUSIVE.
    """
    found = memory_plateau(steps, mib, project_to_step, limit)
    used = np.asarray(mib, dtype=np.float64)
    if found.outcome is not Decided.FAIL or float(used.max()) > limit:
        return found
    at = np.asarray(steps, dtype=np.float64)
    held = _levels(used)
    quarter, first, now = len(held) // 4, held[0], held[-1]
    late = max(held[-quarter:]) - max(held[:-quarter])
    grown = max(held) - first
    rate = (now - held[-quarter - 1]) * (at[-1] - at[0]) / (at[-1] - at[-(at.size // 4)])
    high = found.interval[1] if found.interval else limit
    says = f"{first:.0f} MiB at first, {now:.0f} at the end"
    if now >= LEAK_FACTOR * first and rate >= LEAK_PACE * grown:
        return replace(found, reason=f"{says}; {found.reason}")
    if late <= LEVEL_SHARE * grown and high <= limit:
        level = f"{says}, level in the last quarter; up to {high:.0f} MiB by step"
        reason = f"{level} {project_to_step:g}, limit {limit:.0f} MiB"
        return replace(found, outcome=Decided.PASS, reason=reason)
    slope, goal = found.details["slope_mib_per_step"], f"by step {project_to_step:g}"
    pace = f"{slope:+.3g} MiB/step, {found.estimate:.0f} MiB {goal}, limit {limit:.0f} MiB"
    reason = f"{says}; {pace}: a leak looks so, and an allocator that still fills its free list"
    return replace(found, outcome=Decided.INCONCLUSIVE, reason=reason)


def _rising(steps: Values) -> FloatArray:
    """Finite numbers that rise. Raises UsageError."""
    at = np.asarray(steps, dtype=np.float64)
    if not (np.isfinite(at).all() and (np.diff(at) > 0).all()):
        wrong = np.flatnonzero(~(np.diff(at) > 0))
        where = f" after position {wrong[0]}" if wrong.size else ""
        raise UsageError(f"steps do not rise{where}; allowed: finite, strictly rising numbers")
    return at


def _levels(used: FloatArray) -> list[float]:
    """The middle of each group of these rows."""
    return [float(np.median(group)) for group in np.array_split(used, GROUPS)]


def _sen_slope(at: FloatArray, used: FloatArray) -> tuple[float, tuple[float, float]]:
    """Theil-Sen slope in MiB per step and its one-sided 95 % bounds (Sen 1968, no ties)."""
    groups = np.array_split(np.arange(at.size), GROUPS)
    x = np.array([float(at[group].mean()) for group in groups])
    y = np.array(_levels(used))
    left, right = np.triu_indices(x.size, k=1)
    slopes = np.sort((y[right] - y[left]) / (x[right] - x[left]))
    reach = Z_95 * math.sqrt(x.size * (x.size - 1) * (2 * x.size + 5) / 18)
    low, high = math.floor((slopes.size - reach) / 2), math.ceil((slopes.size + reach) / 2)
    return float(np.median(slopes)), (float(slopes[low]), float(slopes[high]))
