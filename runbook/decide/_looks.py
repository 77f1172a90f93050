"""Walk the looks of a plan in order; the first that settles the question is the answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from runbook.decide.plan import LookPlan
from runbook.decide.types import Answer, Decision

__all__ = ["first_settled", "is_decided"]


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
        outcome=Answer.INCONCLUSIVE,
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
    return decision.outcome is not Answer.INCONCLUSIVE
