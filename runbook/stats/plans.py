"""Walk the looks of a plan in order; the first that settles the question is the answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

from runbook.errors import UsageError
from runbook.stats.decision import Decided, Decision, between


@dataclass(frozen=True, kw_only=True)
class LookPlan:
    """Looks fixed before the first number is seen, so that stopping early stays honest.

    After `looks[i]` rounds a decision may be made with error `spends()[i]`; the shares add up to
    `error`, so the chance of a wrong answer at any look is at most `error` (union bound: it
    needs no model of how the looks depend on each other).

    Attributes:
        looks: numbers of rounds, rising, each at least 3; the last is the most ever run.
        error: the declared error of the whole plan.
        power: the share spent by a look grows as (rounds / last) ** power: 1 spends evenly,
            more than 1 keeps error for later, when there is more data.
    """

    looks: tuple[int, ...]
    error: float = 0.01
    power: float = 1.0

    def __post_init__(self) -> None:
        problems = []
        rising = all(a < b for a, b in pairwise(self.looks))
        if not self.looks or min(self.looks) < 3 or not rising:
            problems.append(f"looks are {self.looks}; allowed: rising round counts from 3 on")
        if not 0 < self.error < 0.5:
            problems.append(f"error is {self.error}; allowed: above 0 and below 0.5")
        if not 0 < self.power <= 10:
            problems.append(f"power is {self.power}; allowed: above 0 up to 10")
        if problems:
            raise UsageError(problems)

    @property
    def max_rounds(self) -> int:
        """Rounds at the last look."""
        return self.looks[-1]

    def spends(self) -> tuple[float, ...]:
        """The error that each look may use; the sum is `error`."""
        reached = [0.0, *((rounds / self.max_rounds) ** self.power for rounds in self.looks)]
        return tuple(self.error * (now - before) for before, now in pairwise(reached))

    def due(self, rounds: int) -> tuple[int, ...]:
        """The looks that `rounds` complete rounds have reached."""
        return tuple(look for look in self.looks if look <= rounds)

    def unspent(self, rounds: int) -> float:
        """Error left for a last look, where a run ended (time, machine) before the plan did."""
        between("rounds", float(rounds), 0, float("inf"))
        pairs = zip(self.looks, self.spends(), strict=True)
        return sum(share for look, share in pairs if look >= rounds)


# Chosen with benchmarks/decisions.py: docs/statistics.md has the rates it gives.
BUCKET_PLAN = LookPlan(looks=(4, 6, 8, 12, 18, 24), error=0.01, power=1.0)


def first_settled(
    rounds: int,
    plan: LookPlan,
    look: Callable[[int, float], Decision],
    settled: Callable[[Decision], bool],
    *,
    final: bool,
) -> Decision:
    """Repeat all looks that `rounds` complete rounds have reached.

    Args:
        rounds: complete rounds so far.
        plan: looks and the error each may spend.
        look: judges the first so many rounds at that error.
        settled: whether an answer before the last look ends the run.
        final: no more rounds will come, so what error is left is spent on a last look.

    Returns:
        The first settled answer, or that of the last look; before it INCONCLUSIVE with `go_on`
        and without estimate, so that nobody acts on a number between two looks.
    """
    reached = plan.due(rounds)
    for count, spend in zip(reached, plan.spends(), strict=False):
        decision = replace(look(count, spend), error_rate=plan.error)
        if count == plan.max_rounds or settled(decision):
            return decision
    if final:
        return replace(look(rounds, plan.unspent(rounds)), error_rate=plan.error)
    coming = plan.looks[len(reached)]
    return Decision(
        outcome=Decided.INCONCLUSIVE,
        error_rate=plan.error,
        n=rounds,
        unit="ratio",
        reason=f"undecided after {rounds} of at most {plan.max_rounds} rounds;"
        f" the next look is after {coming}",
        go_on=True,
        details={"next_look": coming, "max_rounds": plan.max_rounds},
    )


def is_decided(decision: Decision) -> bool:
    """Anything but INCONCLUSIVE."""
    return decision.outcome is not Decided.INCONCLUSIVE
