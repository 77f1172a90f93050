"""Decisions whose unit of evidence is the launch: a throughput target, and scaling."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from runbook.errors import UsageError
from runbook.records.measurement import TOKENS_PER_SECOND
from runbook.stats.decision import Decided, Decision, Detail, FloatArray, between, paired, positive
from runbook.stats.pairs import log_bounds, mean_and_error, t_quantile
from runbook.stats.plans import (
    SCALING_PLAN,
    TARGET_PLAN,
    InterimPlan,
    first_settled,
)

MIN_LAUNCHES = 3
# Three times the worst launch-to-launch noise met (5 %): beyond it even one launch is enough.
FAR = 0.15
STALE_BELOW = 0.5
MOST_SCALING = 1.05
RATIO_WEIGHT = 2 / 3


def meets_target(
    values: Sequence[float] | FloatArray,
    target: float,
) -> Decision:
    """Does the throughput reach the target?

    Args:
        values: one number per launch, tokens / time after warm-up (launches of equal length).
            Blocks or steps of one launch are no substitute: they cannot see how much launches
            differ.
        target: the floor, same unit.

    Returns:
        PASS if the one-sided lower bound of the launches' mean (geometric) reaches the target,
        FAIL if the upper bound is below it, else INCONCLUSIVE. With fewer than 3 launches:
        INCONCLUSIVE, unless all of them are further than 15 % from the target.
        `details["stale_target"]` is True if the target is under half of what is measured.

    Raises:
        UsageError: values or target that are not positive numbers.
    """
    floor = float(positive("target", [target], unit=TOKENS_PER_SECOND)[0])
    array = positive("values", values, unit=TOKENS_PER_SECOND)
    middle = math.exp(float(np.log(array).mean()))
    outcome, interval = Decided.INCONCLUSIVE, None
    if array.size < TARGET_PLAN.units:
        says = few = f"{TARGET_PLAN.units} launches are needed near the target"
        if float(array.min()) >= floor * (1 + FAR):
            outcome, says = Decided.PASS, f"more than {FAR:.0%} above it ({few})"
        elif float(array.max()) < floor * (1 - FAR):
            outcome, says = Decided.FAIL, f"more than {FAR:.0%} below it ({few})"
    else:
        _, interval = log_bounds(np.log(array), TARGET_PLAN.error)
        low, high = interval
        says = f"bounds {low:.4g} to {high:.4g} hold it; add launches"
        if low >= floor:
            outcome, says = Decided.PASS, f"lower bound {low:.4g} reaches it"
        elif high < floor:
            outcome, says = Decided.FAIL, f"upper bound {high:.4g} is below the floor"
    stale = floor < STALE_BELOW * middle
    warning = f"; STALE TARGET: {floor:g} is {floor / middle:.1%} of what is measured"
    details: dict[str, Detail] = {"target": floor, "stale_target": stale}
    return Decision(
        outcome=outcome,
        estimate=middle,
        interval=interval,
        error_rate=TARGET_PLAN.error,
        n=array.size,
        unit=TOKENS_PER_SECOND,
        reason=f"{middle:.4g} against {floor:g} tok/s, {array.size} launch(es): {says}"
        + (warning if stale else ""),
        details=details,
    )


def scaling(
    t1: Sequence[float] | FloatArray,
    tN: Sequence[float] | FloatArray,
    n: int,
    *,
    limit: float = 0.90,
    plan: InterimPlan | None = None,
) -> Decision:
    """Scaling efficiency E = T_N / (N * T_1), held against a floor.

    Args:
        t1: single-device throughput, one value per launch.
        tN: throughput of all N devices together, launched in pairs with `t1`; same config hash.
        n: number of devices, at least 2.
        limit: the floor.
        plan: for a run that stops early, in pairs. None: one analysis of all, with the whole
            one-sided error of SCALING_PLAN.

    Returns:
        PASS if the lower bound of E is above the limit, FAIL if the upper bound is below it,
        INVALID if the estimate is above 1.05 (nothing scales so: something was not compared
        like for like), else INCONCLUSIVE. Below 3 pairs never PASS or FAIL.

    Raises:
        UsageError: values that are not positive numbers, different lengths, n below 2.
    """
    between("limit", limit, 0.0, MOST_SCALING)
    if n < 2:
        raise UsageError(f"n is {n}; scaling needs at least 2 devices")
    one, many = paired(("t1", "tN"), t1, tN, unit=TOKENS_PER_SECOND)

    def analyze(pairs: int, spend: float) -> Decision:
        return _scaling(one[:pairs], many[:pairs], n, limit, spend)

    if plan is None:
        return analyze(one.size, SCALING_PLAN.error)
    return first_settled(one.size, plan, analyze, final=True)


def _scaling(one: FloatArray, many: FloatArray, n: int, limit: float, error: float) -> Decision:
    pairs = one.size
    log_e = float(np.log(many).mean() - np.log(one).mean()) - math.log(n)
    estimate, interval = math.exp(log_e), None
    outcome, says = Decided.INCONCLUSIVE, f"at least {MIN_LAUNCHES} pairs are needed"
    if pairs >= MIN_LAUNCHES:
        half = _half_width(one, many, error)
        interval = (math.exp(log_e - half), math.exp(log_e + half))
        says = f"bounds {interval[0]:.3f} to {interval[1]:.3f} hold the limit {limit:g}"
        if interval[0] > limit:
            outcome, says = Decided.PASS, f"lower bound {interval[0]:.3f} is above {limit:g}"
        elif interval[1] < limit:
            outcome, says = Decided.FAIL, f"upper bound {interval[1]:.3f} is below {limit:g}"
    if estimate > MOST_SCALING:
        outcome = Decided.INVALID
        says = f"above {MOST_SCALING}: not possible, something was not compared like for like"
    return Decision(
        outcome=outcome,
        estimate=estimate,
        interval=interval,
        error_rate=error,
        n=pairs,
        unit="share",
        reason=f"E = {estimate:.3f} from {pairs} pair(s): {says}",
    )


def _half_width(one: FloatArray, many: FloatArray, error: float) -> float:
    """Half-width of a one-sided bound for the mean log ratio of paired launches.

    Five pairs give the spread of their ratio only 4 degrees of freedom. The spread of their
    product helps: with independent launches it is the same, and what the launches of a pair
    share (the state of the machine) only makes it larger. So a weighted mean of both can be too
    wide, never too narrow. Degrees of freedom after Satterthwaite.
    """
    _, ratio_bar = mean_and_error(np.log(many) - np.log(one))
    _, product_bar = mean_and_error(np.log(many) + np.log(one))
    weight = RATIO_WEIGHT
    variance = weight * ratio_bar**2 + (1 - weight) * product_bar**2
    freedom = (one.size - 1) / (weight**2 + (1 - weight) ** 2)
    return t_quantile(error, freedom) * math.sqrt(variance)
