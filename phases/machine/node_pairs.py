"""Which node is slow, where all of them together exchange gradients too slowly.

The first node with each other one, and the second with the third: as many measurements as there are
nodes. A slow node is in every slow pair; if it is the first, the last pair is the only fast one.
"""

from __future__ import annotations

from nsa.contract import Ceiling
from phases.kit.case import Case, Finding, Unanswerable, inconclusive, invalid, passed, skipped
from phases.kit.commands import ceilings_launch
from phases.kit.limits import CEILING_ALL_REDUCE
from phases.kit.rows import Row
from phases.machine.ceilings import as_measurement, measured
from runbook.config.phase import PlanContext
from runbook.records import Launch, Reason
from runbook.records.run import NODE_NAMES

# Of two nodes that share one link nobody can say which one is slow.
_FEWEST_NODES = 3


def pairs(context: PlanContext) -> list[tuple[int, int]]:
    """The pairs that are measured, as places in the run's list of nodes."""
    if context.nodes < _FEWEST_NODES:
        return []
    return [*((0, other) for other in range(1, context.nodes)), (1, 2)]


def pair_launches(context: PlanContext, phase: str) -> list[Launch]:
    """The all-reduce between two nodes, for each pair; they start only if it is needed."""
    return [
        ceilings_launch(
            context,
            phase=phase,
            name=_name(pair),
            purpose=f"all-reduce between nodes {pair[0] + 1} and {pair[1] + 1}",
            on=pair,
        )
        for pair in pairs(context)
    ]


def falls_short(case: Case) -> bool:
    """Do all nodes together exchange gradients more slowly than the profile allows?"""
    limit = case.limit(CEILING_ALL_REDUCE)
    try:
        slowest = measured(case, Ceiling.ALL_REDUCE)[0]
    except Unanswerable:
        return False
    return limit.gated and not limit.holds(slowest.rate)


def pair_rows(context: PlanContext) -> tuple[Row, ...]:
    """The row that names a slow node, where there are enough of them."""
    if not pairs(context):
        return ()
    question = "Which node is slow, where all together exchange gradients too slowly?"
    return (Row("slow_node", question, _slow_node, topic="nodes", rests_on="nodes"),)


def _name(pair: tuple[int, int]) -> str:
    return f"pair_{pair[0] + 1}_{pair[1] + 1}"


def _slow_node(case: Case) -> Finding:
    whole = measured(case, Ceiling.ALL_REDUCE)[0]
    value = as_measurement(case, Ceiling.ALL_REDUCE, whole)
    limit = case.limit(CEILING_ALL_REDUCE)
    if not limit.gated:
        return skipped(Reason.NOT_GATED, "no floor decides on this profile", measurement=value)
    if not falls_short(case):
        return passed(f"none: all together reach {whole.rate:.4g} {whole.unit}", measurement=value)
    fact, _ = case.known(NODE_NAMES)
    names = str(fact.value).split(", ")
    rates = {
        pair: measured(case, Ceiling.ALL_REDUCE, _name(pair))[0].rate
        for pair in pairs(case.context)
    }
    slow = {pair for pair, rate in rates.items() if not limit.holds(rate)}
    told = ", ".join(f"{names[a]}-{names[b]} {rate:.4g}" for (a, b), rate in rates.items())
    text = f"{told} {whole.unit}, the floor is {limit.value:g}; all together {whole.rate:.4g}"
    culprits = _culprits(slow, len(names))
    if culprits:
        which = ", ".join(names[place] for place in culprits)
        reason = f"slow: {which} ({text})"
        return invalid(Reason.WRONG_ENVIRONMENT, reason, measurement=value, topic="nodes")
    if slow:
        reason = f"no single node: its switch, or a setting ({text})"
        return invalid(Reason.WRONG_ENVIRONMENT, reason, measurement=value, topic="nodes")
    reason = f"every pair is fast enough, all together are not ({text})"
    return inconclusive(Reason.UNDECIDED, reason, measurement=value)


def _culprits(slow: set[tuple[int, int]], count: int) -> list[int]:
    """The nodes whose slowness explains exactly these slow pairs; none if nothing does."""
    first = {(0, other) for other in range(1, count)}
    if slow == first:
        return [0]
    # The first node is fast with somebody, so whoever is slow with it is slow itself.
    others = sorted(b for a, b in slow if a == 0)
    explained = {(0, other) for other in others} | ({(1, 2)} if {1, 2} & set(others) else set())
    return others if others and len(others) < count - 1 and slow == explained else []
