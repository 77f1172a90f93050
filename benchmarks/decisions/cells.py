"""A simulated situation, what came of it and is claimed of it, and the rules beside ours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from benchmarks.decisions.noise import FloatArray, Noise
from runbook.stats import (
    AA_PLAN,
    BUCKET_LAUNCHES_PLAN,
    BUCKET_PLAN,
    FUSED_LAUNCHES_PLAN,
    FUSED_PLAN,
    REGRESSION_PLAN,
    SCALING_PLAN,
    TARGET_PLAN,
    Decided,
    Decision,
    FixedPlan,
    InterimPlan,
    TwoStagePlan,
)

# As `nsa.tests.test_performance_guards` has it.
FASTER_PLAN = FixedPlan(units=7, error=0.01)

Plan = InterimPlan | FixedPlan | TwoStagePlan
# By the question as the page of statistics has it.
PLANS: dict[str, Plan] = {
    "best arm, blocks": BUCKET_PLAN,
    "best arm, launches": BUCKET_LAUNCHES_PLAN,
    "fused AdamW, blocks": FUSED_PLAN,
    "fused AdamW, launches": FUSED_LAUNCHES_PLAN,
    "equal arms (A/A)": AA_PLAN,
    "scaling": SCALING_PLAN,
    "throughput target": TARGET_PLAN,
    "v2 faster": FASTER_PLAN,
    "nightly regression": REGRESSION_PLAN,
}

BLOCK_STEPS, BLOCK_WARMUP = 20, 3
LAUNCH_STEPS, LAUNCH_WARMUP = 50, 3


@dataclass(kw_only=True)
class Result:
    """Answers counted over the runs of a cell; the other numbers are sums over them.

    steps: that the decision took. errs: of the documented rule. variance: of the paired log ratio
    that 600 steps allow.
    """

    answers: Counter[str]
    runs: int
    steps: float
    errs: float = 0.0
    variance: float = 0.0

    def __add__(self, other: Result) -> Result:
        """Of both together."""
        names = [field.name for field in fields(self)]
        return Result(**{name: getattr(self, name) + getattr(other, name) for name in names})

    def rate(self, answer: str) -> float:
        """Share of runs with this answer."""
        return self.answers[answer] / self.runs

    @property
    def documented_rule(self) -> float:
        """Share of runs in which the documented rule errs."""
        return self.errs / self.runs

    @property
    def standard_error(self) -> float:
        """Of a paired log ratio after 600 steps."""
        return (self.variance / self.runs) ** 0.5


Run = Callable[[np.random.Generator, int], Result]


@dataclass(frozen=True)
class Claim:
    """A published figure: the share of runs with this answer is at most (or at least) `limit`.

    `at_limit`: the truth lies exactly where the error rate is declared, so the simulated rate
    scatters around the limit and two Monte Carlo standard errors are allowed for.
    `when`: the claim is made only for results of which this is true.
    """

    answer: str
    limit: float
    at_most: bool = True
    at_limit: bool = False
    when: Callable[[Result], bool] = lambda _: True

    def holds(self, result: Result) -> bool | None:
        """True or False; None where the claim is not made."""
        if not self.when(result):
            return None
        rate = result.rate(self.answer)
        slack = 2 * (self.limit * (1 - self.limit) / result.runs) ** 0.5 if self.at_limit else 0.0
        return rate <= self.limit + slack if self.at_most else rate >= self.limit


@dataclass(frozen=True)
class Cell:
    """One situation. `run(rng, runs)` simulates it.

    documented_error: what the documented rule does wrong; empty where there is none.
    """

    question: str
    noise: Noise
    truth: str
    run: Run
    claims: tuple[Claim, ...] = ()
    documented_error: str = ""
    plan: Plan | None = None

    @property
    def name(self) -> str:
        """Stable name; also seeds the random numbers."""
        return f"{self.question} | {self.noise.name} | {self.truth}"


def told(
    decisions: Sequence[Decision],
    *,
    steps: float = 0.0,
    steps_of_each: float = 0.0,
    errs: npt.NDArray[np.bool_] | None = None,
    best: str | None = None,
    wrong: str = "wrong",
    variance: float = 0.0,
) -> Result:
    """What came of these decisions. A WINNER is `right` if it is `best`, else `wrong`.

    steps: that every decision takes; steps_of_each: of what it counts. errs: the runs in which the
    documented rule errs.
    """
    names = (
        ("right" if one.winner == best else wrong)
        if one.outcome is Decided.WINNER
        else one.outcome.value
        for one in decisions
    )
    runs = len(decisions)
    return Result(
        answers=Counter(names),
        runs=runs,
        steps=steps * runs + steps_of_each * sum(one.n for one in decisions),
        errs=0.0 if errs is None else float(errs.sum()),
        variance=variance * runs,
    )


# The hand-written runbook's rules, as it states them, to be measured beside ours.


def last_50(step_times: FloatArray) -> FloatArray:
    """Mean of the rates of the last 50 rows, per run: the runbook's statistic."""
    means: FloatArray = (1.0 / step_times[:, -50:]).mean(axis=1)
    return means


def keep_fused(baseline: FloatArray, fused: FloatArray) -> npt.NDArray[np.bool_]:
    """Keep if the mean of the last 50 rows is not below the baseline's."""
    return last_50(fused) >= last_50(baseline)


def level_memory(mib: FloatArray) -> npt.NDArray[np.bool_]:
    """The usual reading of "memory plateau": the last value is at most 1 % above the first."""
    return mib[:, -1] <= 1.01 * mib[:, 0]


def single_above_ddp(single: FloatArray, ddp: FloatArray, n: int) -> npt.NDArray[np.bool_]:
    """One device is faster than each device of the distributed run."""
    return single > ddp / n


def halves_differ(step_times: FloatArray) -> npt.NDArray[np.bool_]:
    """A two-sample t-test on steps, as if they were independent: unsteady at |t| > 1.96."""
    half = step_times.shape[1] // 2
    first, last = step_times[:, :half], step_times[:, half:]
    error = np.sqrt(first.var(axis=1, ddof=1) / half + last.var(axis=1, ddof=1) / half)
    return np.abs(last.mean(axis=1) - first.mean(axis=1)) / error > 1.96
