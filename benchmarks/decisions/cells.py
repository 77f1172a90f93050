"""A simulated situation, what came of it and is claimed of it, and the rules beside ours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from benchmarks.decisions.noise import FloatArray, Noise
from runbook.stats.decision import Decided, Decision
from runbook.stats.plans import Plan

BLOCK_STEPS, BLOCK_WARMUP = 20, 3
LAUNCH_STEPS, LAUNCH_WARMUP = 50, 3


@dataclass
class Result:
    """Answers counted over the runs of a cell."""

    answers: Counter[str]
    runs: int
    documented_rule: float | None = None  # share of runs in which the documented rule errs
    steps: float | None = None  # mean steps that the decision took
    extra: dict[str, float] = field(default_factory=dict)

    def rate(self, answer: str) -> float:
        """Share of runs with this answer."""
        return self.answers[answer] / self.runs


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
    """One situation. `run(rng, runs)` simulates it."""

    question: str
    noise: Noise
    truth: str
    run: Callable[[np.random.Generator, int], Result]
    claims: tuple[Claim, ...] = ()
    documented_error: str = ""
    plan: Plan | None = None

    @property
    def name(self) -> str:
        """Stable name; also seeds the random numbers."""
        return f"{self.question} | {self.noise.name} | {self.truth}"


def count(decisions: list[Decision], best: str | None = None) -> Counter[str]:
    """Answers; a WINNER counts as `right` or `wrong`."""
    names = []
    for decision in decisions:
        said = decision.outcome.value
        if decision.outcome is Decided.WINNER:
            said = "right" if best is not None and decision.winner == best else "wrong"
        names.append(said)
    return Counter(names)


# The hand-written runbook's rules, as it states them, to be measured beside ours.


def last_50(step_times: FloatArray) -> FloatArray:
    """Mean of the rates of the last 50 rows, per run: the runbook's statistic."""
    means: FloatArray = (1.0 / step_times[:, -50:]).mean(axis=1)
    return means


def keep_fused(baseline: FloatArray, fused: FloatArray) -> FloatArray:
    """Keep if the mean of the last 50 rows is not below the baseline's."""
    return last_50(fused) >= last_50(baseline)


def level_memory(mib: FloatArray) -> FloatArray:
    """The usual reading of "memory plateau": the last value is at most 1 % above the first."""
    return mib[:, -1] <= 1.01 * mib[:, 0]


def single_above_ddp(single: FloatArray, ddp: FloatArray, n: int) -> FloatArray:
    """One device is faster than each device of the distributed run."""
    return single > ddp / n


def halves_differ(step_times: FloatArray) -> FloatArray:
    """A two-sample t-test on steps, as if they were independent: unsteady at |t| > 1.96."""
    half = step_times.shape[1] // 2
    first, last = step_times[:, :half], step_times[:, half:]
    error = np.sqrt(first.var(axis=1, ddof=1) / half + last.var(axis=1, ddof=1) / half)
    return np.abs(last.mean(axis=1) - first.mean(axis=1)) / error > 1.96
