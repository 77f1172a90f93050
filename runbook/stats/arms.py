"""Which arm is best: randomized blocks, paired log ratios, comparisons with every other arm.

Convention for all values of this package: one value is the throughput of one block,
tokens / time of the whole block (or of one launch). Never a mean of rates: that prefers an
erratic arm, because a slow step counts as one row however long it lasted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from runbook.errors import UsageError
from runbook.stats.decision import (
    Decided,
    Decision,
    Detail,
    FloatArray,
    percent,
    too_few,
    unless_disturbed,
)
from runbook.stats.pairs import t_quantile
from runbook.stats.plans import BUCKET_PLAN, InterimPlan, first_settled

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
