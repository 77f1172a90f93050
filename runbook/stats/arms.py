"""Arms held against each other round by round: which is best, is one not worse, or slower?

Randomized blocks, paired log ratios, of several arms comparisons with every other one.

Convention for all values of this package: one value is the throughput of one block,
tokens / time of the whole block (or of one launch). Never a mean of rates: that prefers an
erratic arm, because a slow step counts as one row however long it lasted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from runbook.errors import UsageError
from runbook.records.measurement import TOKENS_PER_SECOND
from runbook.stats.decision import (
    BUCKET_PLAN,
    REGRESSION_PLAN,
    Decided,
    Decision,
    Detail,
    FloatArray,
    InterimPlan,
    TwoStagePlan,
    between,
    first_settled,
    of_ratio,
    paired,
    percent,
    too_few,
    unless_disturbed,
)

if TYPE_CHECKING:
    import pandas as pd


def rounds_of(samples: pd.DataFrame) -> tuple[list[str], FloatArray]:
    """Arm names in order of appearance and their values [rounds, arms], rounds in order.

    Numbered rounds are sorted by number, others stay in order of appearance.

    Raises:
        UsageError: fewer than two arms, an arm missing in a round, a value that is not a finite
            number above 0.
        ValueError: an arm twice in a round.
    """
    table = samples.pivot(index="block", columns="arm", values="value")
    if not np.issubdtype(samples["block"].to_numpy().dtype, np.number):
        table = table.reindex(samples["block"].drop_duplicates())
    arms = samples["arm"].drop_duplicates().tolist()
    values = table[arms].to_numpy(dtype=np.float64)
    good = np.isfinite(values) & (values > 0)
    if len(arms) < 2 or not good.all():
        raise UsageError(
            f"arms {', '.join(map(str, arms))}: at least two are needed, each with one finite value"
            f" above 0 in each of {len(values)} round(s); {int((~good).sum())} lack"
        )
    return list(map(str, arms)), values


def complete_rounds(samples: pd.DataFrame) -> tuple[pd.DataFrame, int]:
    """The rows of rounds in which every arm has one value, and how many rounds were left out.

    For a run that was stopped in the middle of a round.
    """
    arms = samples["arm"].nunique()
    per_block = samples.groupby("block")["arm"].agg(["nunique", "size"])
    whole = per_block.index[(per_block["nunique"] == arms) & (per_block["size"] == arms)]
    return samples[samples["block"].isin(whole)], int(len(per_block) - len(whole))


MIN_ROUNDS = 3
FUTILITY_ERROR = 0.05


def best_arm_sequential(
    samples: pd.DataFrame,
    *,
    plan: InterimPlan = BUCKET_PLAN,
    min_effect: float = 0.02,
    final: bool = False,
    steps: FloatArray | None = None,
) -> Decision:
    """The best of several arms, in a run with interim analyses that stops as soon as it knows.

    A pure function of all complete rounds so far: it repeats the analyses of `plan` in order and
    returns the first that decided, so judging a finished run again gives the same outcome.
    Between them, and while undecided, it is INCONCLUSIVE with `go_on` set. An analysis also
    stops with TIE when no arm can be ahead of all others by `min_effect` (one-sided 95 %);
    that costs no error, since it declares no winner.

    Args:
        samples: columns `arm`, `block` (the round) and `value` (throughput of that arm in that
            round: tokens / time); every arm exactly once in every round.
        plan: the interim analyses; must not be changed after the first round was seen.
        min_effect: smallest lead worth looking for.
        final: no more rounds will come (time is up): spend what error is left on a last analysis.
        steps: seconds per step, [rounds, arms, steps]; a WINNER found on a machine that changed
            its pace meanwhile is INCONCLUSIVE.

    Raises:
        UsageError, ValueError: as `rounds_of`.
    """
    arms, values = rounds_of(samples)
    return judge_rounds_so_far(
        arms, values, plan=plan, min_effect=min_effect, final=final, steps=steps
    )


def judge_rounds_so_far(
    arms: Sequence[str],
    values: FloatArray,
    *,
    plan: InterimPlan,
    min_effect: float = 0.02,
    final: bool = False,
    steps: FloatArray | None = None,
) -> Decision:
    """`best_arm_sequential` on an array [rounds, arms]."""

    def analyze(rounds: int, spend: float) -> Decision:
        decision = judge_rounds(arms, values[:rounds], error=spend, min_effect=min_effect)
        return unless_disturbed(decision, steps)

    def settled(decision: Decision) -> bool:
        return decision.outcome is Decided.WINNER or bool(decision.details["futile"])

    return first_settled(values.shape[0], plan, analyze, final=final, settled=settled)


def judge_rounds(
    arms: Sequence[str],
    values: FloatArray,
    *,
    error: float,
    min_effect: float = 0.02,
) -> Decision:
    """The best of several arms, [rounds, arms], from data of a size that was fixed beforehand.

    Args:
        arms: their names.
        values: throughput of each arm in each round.
        error: chance of declaring a winner among arms that are equally good.
        min_effect: difference (ratio - 1) that would matter; only named in the reason of a TIE.

    Returns:
        WINNER if one arm beats every other one, each in a paired t-test on log ratios at error / 2
        one-sided (no arm of a tied best pair can win more often than `error`); INCONCLUSIVE below
        3 rounds; else TIE: the configured value stays. `estimate` is the ratio of the leader to
        its closest rival, `interval` its two-sided 1 - error interval.
    """
    rounds = values.shape[0]
    if rounds < MIN_ROUNDS:
        what, known = "complete round(s)", {"futile": False}
        return too_few(rounds, what, MIN_ROUNDS, error=error, unit="ratio", details=known)
    mean, bar = _pairwise(np.log(values))
    critical = t_quantile(error / 2, rounds - 1)
    lower = mean - critical * bar
    np.fill_diagonal(lower, np.inf)
    leader = int(np.argmax(mean.sum(axis=1)))
    beats_all = np.flatnonzero((lower > 0).all(axis=1))
    if beats_all.size:
        leader = int(beats_all[0])
    rival = int(np.argmin(lower[leader]))
    upper = mean + t_quantile(FUTILITY_ERROR, rounds - 1) * bar
    np.fill_diagonal(upper, np.inf)
    futile = bool((upper.min(axis=1) < math.log1p(min_effect)).all())
    against = {
        arm: tuple(
            math.exp(mean[leader, other] + reach * bar[leader, other])
            for reach in (0.0, -critical, critical)
        )
        for other, arm in enumerate(arms)
        if other != leader
    }
    ratio, low, high = against[arms[rival]]
    interval = (low, high)
    winner = arms[leader] if beats_all.size else None
    gap = f"{arms[leader]} against {arms[rival]}: {percent(ratio, interval)}"
    details: dict[str, Detail] = {
        "futile": futile,
        "min_effect": min_effect,
        "against": {arm: list(bounds) for arm, bounds in against.items()},
        "leader": arms[leader],
        "rival": arms[rival],
        "standard_error": float(bar[leader, rival]),
        "typical": {
            arm: float(v) for arm, v in zip(arms, np.exp(np.log(values).mean(0)), strict=True)
        },
    }
    return Decision(
        outcome=Decided.WINNER if winner is not None else Decided.TIE,
        winner=winner,
        estimate=ratio,
        interval=interval,
        error_rate=error,
        n=rounds,
        unit="ratio",
        reason=_sentence(gap, winner, futile, min_effect),
        details=details,
    )


def _pairwise(logs: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Mean and standard error of all paired differences: two arrays [arms, arms]."""
    rounds = logs.shape[0]
    gaps = logs[:, :, None] - logs[:, None, :]
    mean = gaps.mean(axis=0)
    variance = np.square(gaps - mean).sum(axis=0) / (rounds - 1)
    return mean, np.sqrt(variance / rounds)


def _sentence(gap: str, winner: str | None, futile: bool, min_effect: float) -> str:
    if winner is not None:
        return f"{winner} beats every other arm; closest, {gap}"
    if futile:
        return f"no arm leads all others by {min_effect:.0%}; {gap}; keep the configured value"
    return f"no arm is shown to beat every other one; {gap}; keep the configured value"


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
