"""Is a run steady: does its speed stay where it was, without pauses?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from runbook.stats.decision import Decided, Decision, Detail, FloatArray, between, positive, too_few
from runbook.stats.pairs import t_quantile, t_upper_tail
from runbook.stats.throughput import MAD_TO_SIGMA, warmup_cut

FEWEST_BATCHES = 8
SHORTEST_BATCH = 10
# A pause is a step of more than twice the median; in the trend it counts as this much only,
# because its whole length is already judged as stall.
PAUSE_RATIO = 2.0
# A slow step is beyond so many robust deviations of the usual ones, and by so much at least.
SLOW_DEVIATIONS = 5.0
SLOW_LEAST = 0.05
# So many slow steps, most of them equally far apart, come by the clock.
PERIODIC_COUNT = 5
PERIODIC_SHARE = 0.7
# One-sided, of each bound of the slope: a 90 % interval.
ERROR = 0.05
CHANGE_ERROR = 0.01
SEGMENT = 3


def steady(
    step_times: Sequence[float] | FloatArray,
    *,
    batch: int = 50,
    tolerance: float = 0.03,
    stall_limit: float = 0.01,
) -> Decision:
    """Does the step time stay level over the run?

    Steps are no independent evidence (they follow each other's pace), batches of about 50 are
    nearly so; what dependence is left between batches widens the interval.

    Args:
        step_times: seconds per step, in order, of one launch; leave out steps with an
            evaluation or a checkpoint. Warm-up is found and cut (`warmup_cut`).
        batch: steps per batch; shorter (down to 10) where the run holds fewer than 8 batches.
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
    size = min(batch, max(SHORTEST_BATCH, kept.size // FEWEST_BATCHES))
    count = kept.size // size
    period = stall_period(kept)
    details: dict[str, Detail] = {
        "warmup_steps": cut,
        "stall": stall,
        "stall_period": period,
        "batch_steps": size,
    }
    if count < FEWEST_BATCHES:
        needed = FEWEST_BATCHES * SHORTEST_BATCH
        few = too_few(
            kept.size, "steps after warm-up", needed, error=ERROR, unit="share", details=details
        )
        return replace(few, n=count)
    # Pauses are capped; the oldest odd steps are left out.
    capped = np.minimum(kept, PAUSE_RATIO * float(np.median(kept)))
    levels = np.log(capped[kept.size - count * size :].reshape(count, size).mean(axis=1))
    slope, half, factor = _total_slope(levels)
    split, shift, p = _change_point(levels, factor)
    first = cut + (kept.size - count * size) + split * size
    details |= {"change_p": p, "change_shift": shift, "change_step": first}
    interval = (math.expm1(slope - half), math.expm1(slope + half))
    faults = []
    if interval[0] > tolerance or interval[1] < -tolerance:
        faults.append(f"beyond +-{tolerance:.0%}")
    if p < CHANGE_ERROR and abs(shift) > tolerance:
        faults.append(f"shift of {shift:+.1%} at step {first} (p = {p:.2g})")
    if stall > stall_limit:
        often = f", a slow step every {period} steps" if period else ""
        faults.append(f"stall {stall:.1%} of the time, limit {stall_limit:.1%}{often}")
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
        error_rate=ERROR,
        n=count,
        unit="share",
        reason=f"{says} ({count} batches of {size} steps)",
        details=details,
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


def stall_period(times: FloatArray) -> int | None:
    """Every how many steps a slow one comes, if they come by the clock; else None."""
    at = np.flatnonzero(_slow(times))
    if at.size < PERIODIC_COUNT:
        return None
    gaps, counts = np.unique(np.diff(at), return_counts=True)
    best = int(np.argmax(counts))
    regular = gaps[best] > 1 and counts[best] >= PERIODIC_SHARE * (at.size - 1)
    return int(gaps[best]) if regular else None


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
