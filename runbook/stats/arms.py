"""Arms in rounds: which is best, may a variant replace its baseline, and is HEAD slower?

Randomized blocks, paired log ratios. Convention for all values of this package: one value is the
throughput of one block, tokens / time of the whole block (or of one launch). Never a mean of rates:
that prefers an erratic arm, because a slow step counts as one row however long it lasted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from runbook.errors import UsageError
from runbook.records.evidence import Frame
from runbook.stats import (
    REGRESSION_PLAN,
    Decided,
    Decision,
    FloatArray,
    InterimPlan,
    Values,
    between,
    first_settled,
    paired,
    percent,
    too_few,
    unless_disturbed,
)

MIN_ROUNDS = 3
# The smallest lead worth looking for: once no arm can have it, at this one-sided error, all tie.
MIN_EFFECT = 0.02
FUTILITY_ERROR = 0.05


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
    return float(values.mean()), float(values.std(ddof=1)) / math.sqrt(values.size)


def log_bounds(logs: FloatArray, error: float) -> tuple[float, tuple[float, float]]:
    """What the mean of at least two logarithms stands for, and its two one-sided bounds."""
    mean, bar = mean_and_error(logs)
    half = t_quantile(error, logs.size - 1) * bar
    return math.exp(mean), (math.exp(mean - half), math.exp(mean + half))


def rounds_of(samples: Frame) -> tuple[list[str], FloatArray]:
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


def complete_rounds(samples: Frame) -> tuple[Frame, int]:
    """The rows of rounds in which every arm has one value, and how many rounds were left out.

    For a run that was stopped in the middle of a round.
    """
    arms = samples["arm"].nunique()
    per_block = samples.groupby("block")["arm"].agg(["nunique", "size"])
    whole = per_block.index[(per_block["nunique"] == arms) & (per_block["size"] == arms)]
    return samples[samples["block"].isin(whole)], int(len(per_block) - len(whole))


def best_arm_sequential(
    arms: Sequence[str],
    values: FloatArray,
    *,
    plan: InterimPlan,
    final: bool = False,
    steps: FloatArray | None = None,
) -> Decision:
    """The best of several arms, in a run with interim analyses that stops as soon as it knows.

    A pure function of all complete rounds so far: it repeats the analyses of `plan` in order and
    returns the first that decided, so judging a finished run again gives the same outcome.
    Between them, and while undecided, it is INCONCLUSIVE with `go_on` set. An analysis also
    stops with TIE when no arm can be ahead of all others by 2 % (one-sided 95 %); that costs no
    error, since it declares no winner.

    Args:
        arms: their names.
        values: throughput (tokens / time) of each arm in each round, as `rounds_of` has it.
        plan: the interim analyses; must not be changed after the first round was seen.
        final: no more rounds will come (time is up): spend what error is left on a last analysis.
        steps: seconds per step, [rounds, arms, steps]; a WINNER found on a machine that changed
            its pace meanwhile is INCONCLUSIVE.
    """

    def analyze(rounds: int, spend: float) -> Decision:
        return unless_disturbed(judge_rounds(arms, values[:rounds], error=spend), steps)

    def settled(decision: Decision) -> bool:
        return decision.outcome is Decided.WINNER or bool(decision.details["futile"])

    return first_settled(values.shape[0], plan, analyze, final=final, settled=settled)


def judge_rounds(arms: Sequence[str], values: FloatArray, *, error: float) -> Decision:
    """The best of several arms, [rounds, arms], from data of a size that was fixed beforehand.

    Args:
        arms: their names.
        values: throughput of each arm in each round.
        error: chance of declaring a winner among arms that are equally good.

    Returns:
        WINNER if one arm beats every other one, each in a paired t-test on log ratios at error / 2
        one-sided (no arm of a tied best pair can win more often than `error`); INCONCLUSIVE below
        3 rounds; else TIE: the configured value stays. `estimate` is the ratio of the leader to
        its closest rival, `interval` its two-sided 1 - error interval; `futile` among the details
        says that no arm can lead by 2 %.
    """
    rounds = values.shape[0]
    if rounds < MIN_ROUNDS:
        return too_few(rounds, "complete round(s)", MIN_ROUNDS, details={"futile": False})
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
    futile = bool((upper.min(axis=1) < math.log1p(MIN_EFFECT)).all())
    gap, half = mean[leader, rival], critical * bar[leader, rival]
    ratio, interval = math.exp(gap), (math.exp(gap - half), math.exp(gap + half))
    closest = f"{arms[leader]} against {arms[rival]}: {percent(ratio, interval)}"
    says = f"no arm is shown to beat every other one; {closest}; keep the configured value"
    if beats_all.size:
        says = f"{arms[leader]} beats every other arm; closest, {closest}"
    elif futile:
        says = f"no arm leads all others by {MIN_EFFECT:.0%}; {closest}; keep the configured value"
    return Decision(
        outcome=Decided.WINNER if beats_all.size else Decided.TIE,
        winner=arms[leader] if beats_all.size else None,
        estimate=ratio,
        interval=interval,
        n=rounds,
        reason=says,
        details={"futile": futile},
    )


def _pairwise(logs: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Mean and standard error of all paired differences: two arrays [arms, arms]."""
    rounds = logs.shape[0]
    gaps = logs[:, :, None] - logs[:, None, :]
    return gaps.mean(axis=0), gaps.std(axis=0, ddof=1) / math.sqrt(rounds)


# A loss that a variant may have, as a share. A gross one (so many margins) must be excluded at this
# error before anything is kept, however noisy the machine.
MARGIN, GROSS_MARGINS, GROSS_ERROR = 0.02, 2.5, 0.001


def non_inferiority(
    baseline: Values,
    variant: Values,
    *,
    plan: InterimPlan,
    margin: float = MARGIN,
    final: bool = True,
    steps: FloatArray | None = None,
) -> Decision:
    """May the variant replace the baseline: is it at most `margin` slower?

    Args:
        baseline: throughput (tokens / time) of the baseline, one value per round.
        variant: the same of the variant, same rounds.
        plan: when the run may stop, and the one-sided error of either answer.
        margin: loss that would be accepted, as a share.
        final: no more rounds will come, so decide with what error is left.
        steps: seconds per step, [rounds, 2, steps]; KEEP or DROP found on a machine that changed
            its pace meanwhile is INCONCLUSIVE.

    Returns:
        KEEP if the lower bound of variant / baseline is above 1 - margin, a loss of 2.5
        margins is excluded at 0.1 % and, where the plan keeps at its end only, all its rounds were
        run (what happens now and then is in none of a few); DROP if the upper bound is below
        1 - margin; else INCONCLUSIVE (leave it unset). `estimate` is the ratio.

    Raises:
        UsageError: values that are not positive numbers, different lengths, margin out of range.
    """
    between("margin", margin, 0.0, 0.5)
    first, second = paired(("baseline", "variant"), baseline, variant)
    logs = np.log(second) - np.log(first)

    def analyze(rounds: int, spend: float) -> Decision:
        # The errors of keeping and of dropping here.
        errors = (plan.error if plan.keep_at_end else spend, spend)
        decision = _non_inferior(logs[:rounds], margin, errors, plan.error)
        early = plan.keep_at_end and rounds < plan.max_rounds
        if early and decision.outcome is Decided.KEEP:
            missing = f"only all {plan.max_rounds} rounds show that it does not stall now and then"
            reason = f"{decision.reason}; {missing}"
            decision = replace(decision, outcome=Decided.INCONCLUSIVE, reason=reason)
        return unless_disturbed(decision, steps)

    return first_settled(first.size, plan, analyze, final=final)


def _non_inferior(
    logs: FloatArray, margin: float, errors: tuple[float, float], whole: float
) -> Decision:
    """`errors` are those of keeping and of dropping here, `whole` is that of all analyses."""
    keep_error, error = errors
    if logs.size < MIN_ROUNDS:
        return too_few(logs.size, "round(s)", MIN_ROUNDS)
    ratio, (low, _) = log_bounds(logs, keep_error)
    _, (_, high) = log_bounds(logs, error)
    _, (worst, _) = log_bounds(logs, GROSS_ERROR * keep_error / whole)
    limit, gross = 1.0 - margin, GROSS_MARGINS * margin
    outcome = Decided.INCONCLUSIVE
    if low > limit and worst > 1.0 - gross:
        outcome, says = Decided.KEEP, f"at most {margin:.1%} slower"
    elif low > limit:
        says = f"a loss of {gross:.1%} is not excluded"
    elif high < limit:
        outcome, says = Decided.DROP, f"more than {margin:.1%} slower"
    else:
        says = f"cannot tell whether more than {margin:.1%} slower"
    return of_ratio(outcome, ratio, (low, high), logs.size, "variant", says)


def regression(reference: Values, head: Values) -> Decision:
    """Is HEAD slower than the pinned reference, launched in turn with it the same night?

    Two stages, those of REGRESSION_PLAN: a few rounds every night; only if these make a loss likely
    (one-sided p below the plan's suspicion) are more added, and only then can the answer be FAIL.
    False alarms are rarer than the plan's error a night, at a fraction of the cost of all rounds.

    Args:
        reference: throughput of the reference, one value per launch.
        head: the same of HEAD, same rounds.

    Returns:
        PASS: no loss shown. FAIL: the upper bound of head / reference is below 1.
        INCONCLUSIVE with `go_on`: suspicious, run the second stage (or too few rounds yet).

    Raises:
        UsageError: values that are not positive numbers, or different lengths.
    """
    plan, error = REGRESSION_PLAN, REGRESSION_PLAN.error
    first, second = paired(("reference", "head"), reference, head)
    whole = plan.first + plan.more
    if first.size < plan.first:
        return too_few(first.size, "round(s)", MIN_ROUNDS, go_on=True)
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
    found = of_ratio(outcome, ratio, bounds, used, "head", says)
    return replace(found, go_on=outcome is Decided.INCONCLUSIVE)


def of_ratio(
    outcome: Decided, ratio: float, bounds: tuple[float, float], n: int, what: str, says: str
) -> Decision:
    """A decision about the ratio of two throughputs of n rounds; `what` is compared."""
    return Decision(
        outcome=outcome,
        estimate=ratio,
        interval=bounds,
        n=n,
        reason=f"{what} {percent(ratio, bounds, f'{n} rounds')}: {says}",
    )
