"""Two runs that were made at different times: is a loss shown, against one run or against a level?

Nothing was launched in turn here, so a change of the machine between the runs counts too: a loss is
shown only where it is more than an allowance, and the uncertainty is added to that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from runbook.records.measurement import TOKENS_PER_SECOND
from runbook.stats.decision import (
    Decided,
    Decision,
    FloatArray,
    between,
    of_ratio,
    percent,
    positive,
    too_few,
)
from runbook.stats.launches import FAR, MIN_LAUNCHES
from runbook.stats.pairs import t_quantile

# One-sided, of the bound of a loss.
LOSS_ERROR = 0.01
# Runs that make a level, and as many more steps between runs that tell its noise.
LEVEL_RUNS = 5
LEVEL_WINDOW = 30
# Launches of a healthy machine differ by 1 % and more: three that agree better did so by luck.
LEAST_SPREAD = 0.01

# What two runs at different times may differ by without any cause. Launches of a healthy machine
# with GPUs differ by 5 % at worst; on shared cores a neighbor halves the pace, and equal runs vary
# by 30 %.
_ALLOWANCE = {"cuda": 0.05, "cpu": 0.5}


def allowance_of(device: str) -> float:
    """The allowance for two runs on this type of device, a share; an unknown one has the most."""
    return _ALLOWANCE.get(device, max(_ALLOWANCE.values()))


def loss_shown(
    reference: Sequence[float] | FloatArray,
    head: Sequence[float] | FloatArray,
    *,
    allowance: float,
) -> Decision:
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


def level_runs(runs: Sequence[float] | FloatArray) -> slice:
    """Where the best level of these values lies: five consecutive ones with the highest mean.

    All of them if they are fewer than five. The newest of equal ones.
    """
    values = np.asarray(runs, dtype=np.float64)
    if values.size < LEVEL_RUNS:
        return slice(0, values.size)
    means = np.lib.stride_tricks.sliding_window_view(values, LEVEL_RUNS).mean(axis=1)
    first = int(values.size - LEVEL_RUNS - np.argmax(means[::-1]))
    return slice(first, first + LEVEL_RUNS)


def below_level(
    history: Sequence[float] | FloatArray,
    head: float,
    *,
    allowance: float,
) -> Decision:
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
        return too_few(int(runs.size), "earlier run(s)", LEVEL_RUNS, error=LOSS_ERROR, unit="ratio")
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
    reason = f"{percent(ratio, (low, high), says)}: {words}"
    return of_ratio(outcome, ratio, (low, high), error=LOSS_ERROR, n=n, reason=reason)
