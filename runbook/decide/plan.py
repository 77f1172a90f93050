"""When to look at the data, and how much of the error each look may spend."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from runbook.decide._inputs import between
from runbook.errors import UsageError

__all__ = ["BUCKET_PLAN", "LookPlan"]


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
