"""Two arms, round by round: is one not worse, or slower than it was?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from runbook.records.measurement import TOKENS_PER_SECOND
from runbook.stats.decision import (
    Decided,
    Decision,
    FloatArray,
    between,
    of_ratio,
    paired,
    percent,
    too_few,
    unless_disturbed,
)
from runbook.stats.plans import (
    REGRESSION_PLAN,
    InterimPlan,
    TwoStagePlan,
    first_settled,
)


@lru_cache(maxsize=4096)
def t_quantile(error: float, freedom: float) -> float:
    """The t that a Student variable of `freedom` degrees exceeds with probability `error`."""
    from scipy.special import stdtrit

    return float(-stdtrit(freedom, error))


def t_upper_tail(t: float, freedom: float) -> float:
    """Probability that a Student variable of `freedom` degrees exceeds `t`."""
    from scipy.special import stdtr

    return float(stdtr(freedom, -t))


def mean_and_error(values: FloatArray) -> tuple[float, float]:
    """Mean and its standard error (n - 1 in the variance); at least two values."""
    n = values.size
    mean = float(values.mean())
    spread = values - mean
    return mean, math.sqrt(float(spread @ spread) / (n - 1) / n)


def log_bounds(logs: FloatArray, error: float) -> tuple[float, tuple[float, float]]:
    """What the mean of at least two logarithms stands for, and its two one-sided bounds."""
    mean, bar = mean_and_error(logs)
    half = t_quantile(error, logs.size - 1) * bar
    return math.exp(mean), (math.exp(mean - half), math.exp(mean + half))


MIN_PAIRS = 3
# A gross loss (this many margins) must be excluded at this error before anything is kept,
# however noisy the machine.
GROSS_MARGINS = 2.5
GROSS_ERROR = 0.001


def non_inferiority(
    baseline: Sequence[float] | FloatArray,
    variant: Sequence[float] | FloatArray,
    margin: float = 0.02,
    error: float = 0.05,
    *,
    plan: InterimPlan | None = None,
    final: bool = True,
    steps: FloatArray | None = None,
) -> Decision:
    """May the variant replace the baseline: is it at most `margin` slower?

    Args:
        baseline: throughput (tokens / time) of the baseline, one value per round.
        variant: the same of the variant, same rounds.
        margin: loss that would be accepted, as a share.
        error: one-sided error of either answer.
        plan: for a run that stops early; its error counts then. None: one analysis of all.
        final: with a plan: no more rounds will come, so decide with what error is left.
        steps: seconds per step, [rounds, 2, steps]; KEEP or DROP found on a machine that changed
            its pace meanwhile is INCONCLUSIVE.

    Returns:
        KEEP if the lower bound of variant / baseline is above 1 - margin, a loss of 2.5
        margins is excluded at 0.1 % and, where the plan keeps at its end only, all its rounds were
        run (what happens now and then is in none of a few); DROP if the upper bound is below
        1 - margin; else INCONCLUSIVE (leave it unset). `estimate` is the ratio.

    Raises:
        UsageError: values that are not positive numbers, different lengths, margin or error
            out of range.
    """
    between("margin", margin, 0.0, 0.5)
    between("error", error, 0.0, 0.5)
    first, second = paired(("baseline", "variant"), baseline, variant, unit=TOKENS_PER_SECOND)

    def analyze(rounds: int, spend: float) -> Decision:
        at_end = plan is not None and plan.keep_at_end
        whole = error if plan is None else plan.error
        errors = (whole if at_end else spend, spend)
        decision = _non_inferior(first[:rounds], second[:rounds], margin, errors, whole)
        if plan and at_end and rounds < plan.max_rounds and decision.outcome is Decided.KEEP:
            missing = f"only all {plan.max_rounds} rounds show that it does not stall now and then"
            reason = f"{decision.reason}; {missing}"
            decision = replace(decision, outcome=Decided.INCONCLUSIVE, reason=reason)
        return unless_disturbed(decision, steps)

    if plan is None:
        return analyze(first.size, error)
    return first_settled(first.size, plan, analyze, final=final)


def _non_inferior(
    first: FloatArray,
    second: FloatArray,
    margin: float,
    errors: tuple[float, float],
    whole: float,
) -> Decision:
    """`errors` are those of keeping and of dropping here, `whole` is that of all analyses."""
    keep_error, error = errors
    if first.size < MIN_PAIRS:
        return too_few(first.size, "round(s)", MIN_PAIRS, error=error, unit="ratio")
    logs = np.log(second) - np.log(first)
    ratio, (low, _) = log_bounds(logs, keep_error)
    _, (_, high) = log_bounds(logs, error)
    limit = 1.0 - margin
    _, (worst, _) = log_bounds(logs, GROSS_ERROR * keep_error / whole)
    gross = GROSS_MARGINS * margin
    if low > limit and worst > 1.0 - gross:
        outcome, says = Decided.KEEP, f"at most {margin:.1%} slower"
    elif low > limit:
        outcome, says = Decided.INCONCLUSIVE, f"a loss of {gross:.1%} is not excluded"
    elif high < limit:
        outcome, says = Decided.DROP, f"more than {margin:.1%} slower"
    else:
        outcome = Decided.INCONCLUSIVE
        says = f"cannot tell whether more than {margin:.1%} slower"
    return _decision(outcome, "variant", ratio, (low, high), error, first.size, says)


def regression(
    reference: Sequence[float] | FloatArray,
    head: Sequence[float] | FloatArray,
    plan: TwoStagePlan = REGRESSION_PLAN,
) -> Decision:
    """Is HEAD slower than the pinned reference, launched in turn with it the same night?

    Two stages: a few rounds every night; only if these make a loss likely (one-sided p below the
    plan's suspicion) are more added, and only then can the answer be FAIL. Fewer false alarms than
    the plan's error a night follow, at a fraction of the cost of all rounds.

    Args:
        reference: throughput of the reference, one value per launch.
        head: the same of HEAD, same rounds.
        plan: the two stages, and the one-sided error of the final bound.

    Returns:
        PASS: no loss shown. FAIL: the upper bound of head / reference is below 1.
        INCONCLUSIVE with `go_on`: suspicious, run the second stage (or too few rounds yet).

    Raises:
        UsageError: values that are not positive numbers, or different lengths.
    """
    error = plan.error
    first, second = paired(("reference", "head"), reference, head, unit=TOKENS_PER_SECOND)
    whole = plan.first + plan.more
    if first.size < plan.first:
        few = "round(s)", MIN_PAIRS
        return too_few(first.size, *few, error=error, unit="ratio", go_on=True)
    logs = np.log(second) - np.log(first)
    _, (_, early) = log_bounds(logs[: plan.first], plan.suspicion)
    if early >= 1.0:
        used, outcome, says = plan.first, Decided.PASS, "no loss suspected"
    elif first.size < whole:
        used, outcome = first.size, Decided.INCONCLUSIVE
        says = f"a loss is suspected; run {whole - first.size} more round(s)"
    else:
        used = whole
        _, (_, late) = log_bounds(logs[:whole], error)
        outcome, says = (Decided.FAIL, "slower") if late < 1.0 else (Decided.PASS, "no loss shown")
    ratio, bounds = log_bounds(logs[:used], error)
    go_on = outcome is Decided.INCONCLUSIVE
    return _decision(outcome, "head", ratio, bounds, error, used, says, go_on=go_on)


def _decision(
    outcome: Decided,
    name: str,
    ratio: float,
    bounds: tuple[float, float],
    error: float,
    n: int,
    says: str,
    *,
    go_on: bool = False,
) -> Decision:
    reason = f"{name} {percent(ratio, bounds, f'{n} rounds')}: {says}"
    return of_ratio(outcome, ratio, bounds, error=error, n=n, reason=reason, go_on=go_on)
