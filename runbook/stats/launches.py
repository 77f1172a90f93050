"""Decisions whose unit of evidence is the launch: a throughput target, scaling, and a loss.

A loss of two runs that were made at different times, against one run or against a level: nothing
was launched in turn, so a change of the machine between the runs counts too. It is shown only where
it is more than an allowance, and the uncertainty is added to that.
"""

from __future__ import annotations

import math

import numpy as np

from runbook.errors import UsageError
from runbook.records.measurement import TOKENS_PER_SECOND
from runbook.stats import (
    SCALING_PLAN,
    TARGET_PLAN,
    Decided,
    Decision,
    FloatArray,
    InterimPlan,
    Values,
    between,
    first_settled,
    paired,
    percent,
    positive,
    too_few,
)
from runbook.stats.arms import log_bounds, mean_and_error, t_quantile

MIN_LAUNCHES = 3
# Three times the worst launch-to-launch noise met (5 %): beyond it even one launch is enough.
FAR = 0.15
STALE_BELOW = 0.5
MOST_SCALING = 1.05
RATIO_WEIGHT = 2 / 3


def meets_target(values: Values, target: float) -> Decision:
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
        A target under half of what is measured is stale, which the reason says.

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
    if floor < STALE_BELOW * middle:
        says += f"; STALE TARGET: {floor:g} is {floor / middle:.1%} of what is measured"
    return Decision(
        outcome=outcome,
        estimate=middle,
        interval=interval,
        n=array.size,
        reason=f"{middle:.4g} against {floor:g} tok/s, {array.size} launch(es): {says}",
    )


def scaling(
    t1: Values, tN: Values, n: int, *, limit: float = 0.90, plan: InterimPlan | None = None
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
    one, many = paired(("t1", "tN"), t1, tN)

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
        n=pairs,
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


# One-sided, of the bound of a loss.
LOSS_ERROR = 0.01
# Runs that make a level, and as many more steps between runs that tell its noise.
LEVEL_RUNS = 5
LEVEL_WINDOW = 30
# Launches of a healthy machine differ by 1 % and more: three that agree better did so by luck.
LEAST_SPREAD = 0.01


def loss_shown(reference: Values, head: Values, *, allowance: float) -> Decision:
    """Is `head` slower than an earlier run by more than `allowance`?

    Args:
        reference: throughput of the earlier run, one value per launch.
        head: the same of the run in question; the numbers of launches may differ.
        allowance: the loss that two runs at different times may show without any cause, as a share.

    Returns:
        FAIL if the upper bound of head / reference is below 1 - allowance; PASS if the estimate is
        not below it; else INCONCLUSIVE: suspected, not shown. Fewer than 3 launches on a side show
        no spread: their bounds are those of the extreme launches, 15 % apart. `estimate` is the
        ratio of the geometric means.

    Raises:
        UsageError: values that are not positive numbers, allowance out of range.
    """
    between("allowance", allowance, 0.0, 1.0)
    before = np.log(positive("reference", reference, unit=TOKENS_PER_SECOND))
    now = np.log(positive("head", head, unit=TOKENS_PER_SECOND))
    middle = float(now.mean() - before.mean())
    if min(before.size, now.size) < MIN_LAUNCHES:
        most = -math.log1p(-FAR)
        low, high = float(now.min() - before.max()) - most, float(now.max() - before.min()) + most
    else:
        half = _welch_half(before, now)
        low, high = middle - half, middle + half
    says = f"{before.size} and {now.size} launches"
    return _decided((low, middle, high), allowance, int(now.size), says)


def _welch_half(a: FloatArray, b: FloatArray) -> float:
    """Half-width of a one-sided bound of the difference of two means, unequal variances."""
    parts = [max(float(x.var(ddof=1)), LEAST_SPREAD**2) / x.size for x in (a, b)]
    freedom = sum(parts) ** 2 / sum(
        part**2 / (x.size - 1) for part, x in zip(parts, (a, b), strict=True)
    )
    return t_quantile(LOSS_ERROR, freedom) * math.sqrt(sum(parts))


def level_runs(runs: Values) -> slice:
    """Where the best level of these values lies: five consecutive ones with the highest mean.

    All of them if they are fewer than five. The newest of equal ones.
    """
    values = np.asarray(runs, dtype=np.float64)
    if values.size < LEVEL_RUNS:
        return slice(0, values.size)
    means = np.lib.stride_tricks.sliding_window_view(values, LEVEL_RUNS).mean(axis=1)
    first = int(values.size - LEVEL_RUNS - np.argmax(means[::-1]))
    return slice(first, first + LEVEL_RUNS)


def below_level(history: Values, head: float, *, allowance: float) -> Decision:
    """Is `head` slower than the best level that the last runs held, by more than `allowance`?

    The level is the best mean of 5 consecutive runs among the last 30: a single lucky run is none,
    and a slow erosion cannot take it along. How much runs differ is taken from the steps between
    consecutive ones, which a trend hardly widens.

    Args:
        history: throughput of the earlier runs, oldest first, one value per run.
        head: throughput of the run in question.
        allowance: the loss that is not worth a word, as a share.

    Returns:
        FAIL if the upper bound of head / level is below 1 - allowance; PASS if the estimate is not
        below it; else INCONCLUSIVE: suspected, not shown, or fewer than 5 earlier runs.

    Raises:
        UsageError: values that are not positive numbers, allowance out of range.
    """
    between("allowance", allowance, 0.0, 1.0)
    runs = np.log(positive("history", history, unit=TOKENS_PER_SECOND))[-LEVEL_WINDOW:]
    now = float(np.log(positive("head", [head], unit=TOKENS_PER_SECOND))[0])
    if runs.size < LEVEL_RUNS:
        return too_few(int(runs.size), "earlier run(s)", LEVEL_RUNS)
    best = runs[level_runs(runs)]
    steps = np.diff(runs)
    # Successive differences: twice the variance of a run, on two thirds of their number of degrees.
    spread = max(math.sqrt(float(steps @ steps) / steps.size / 2), LEAST_SPREAD)
    width = spread * math.sqrt(1 + 1 / LEVEL_RUNS)
    half = t_quantile(LOSS_ERROR, steps.size * 2 / 3) * width
    middle = now - float(best.mean())
    says = f"{runs.size} earlier runs"
    return _decided((middle - half, middle, middle + half), allowance, runs.size, says)


def _decided(logs: tuple[float, float, float], allowance: float, n: int, says: str) -> Decision:
    """`logs` are the lower bound, the estimate and the upper bound of the log ratio."""
    low, ratio, high = (math.exp(value) for value in logs)
    if high < 1 - allowance:
        outcome, words = Decided.FAIL, f"a loss of more than {allowance:.0%} is shown"
    elif ratio < 1 - allowance:
        outcome = Decided.INCONCLUSIVE
        words = f"a loss of more than {allowance:.0%} is suspected, not shown"
    else:
        outcome, words = Decided.PASS, "no loss shown"
    return Decision(
        outcome=outcome,
        estimate=ratio,
        interval=(low, high),
        n=n,
        reason=f"{percent(ratio, (low, high), says)}: {words}",
    )
