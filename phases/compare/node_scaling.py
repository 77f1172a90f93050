"""What each further node adds: E = T_n / (n x T of one whole node), at one batch per rank."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from phases.compare import scaling
from phases.compare.rates import cell, launch_rates, pooled_rate
from phases.kit.case import Case, gather, optional
from phases.kit.finding import Finding, invalid
from phases.kit.measure import decided, shown_only
from phases.kit.rows import Row, RowsOf
from phases.machine.nodes import other_nodes
from phases.training.training import require_sound
from runbook.config.phase import PlanContext
from runbook.records import Measurement, Outcome, Reason, Table
from runbook.stats.decision import Decision
from runbook.stats.launches import scaling_over
from runbook.stats.plans import SCALING_PLAN

NODE_SCALING = "node_scaling"


def node_scaling_rows(context: PlanContext) -> tuple[Row, ...]:
    """The row of a run on several nodes, where launches on fewer of them say anything new."""
    several = scaling.numbers_of_nodes(context)
    return (RowsOf("single_gpu").one(NODE_SCALING, _node_scaling),) if several else ()


def _side(case: Case, nodes: int) -> scaling.Side:
    """The launches on so many nodes; those on all of them are the baseline's."""
    whole = nodes == case.context.nodes
    return (
        scaling.whole_side(case)
        if whole
        else scaling.side_of(case, scaling.of_nodes(case.context, nodes))
    )


def _numbers(case: Case) -> tuple[int, ...]:
    return (*scaling.numbers_of_nodes(case.context), case.context.nodes)


def _require_comparable(case: Case, sides: Mapping[int, scaling.Side]) -> None:
    """Raise a finding where a launch ran on other nodes than planned, unsound, or unlike."""
    for side in sides.values():
        for name in side.names:
            launch = side.case.completed(name)
            if problems := other_nodes(launch, side.case.env(name)):
                reason = f"{launch.launch.id}: {'; '.join(problems)}"
                paths = (launch.path("env"), launch.path("devices_before"))
                raise invalid(Reason.MISMATCH, reason, evidence=paths, topic="plausible")
        if side.nodes < case.context.nodes:
            require_sound(side.case, side.names)
            if unlike := scaling.unlike_baseline(case, side.names):
                raise unlike


def _efficiencies(case: Case) -> dict[int, tuple[Measurement, Decision]]:
    """By number of nodes E against one whole node, and what it decides."""
    sides = {nodes: _side(case, nodes) for nodes in _numbers(case)}
    _require_comparable(case, sides)
    rounds = min(len(side.names) for side in sides.values())
    rates = {n: launch_rates(side.case, side.names)[:rounds] for n, side in sides.items()}
    values = {n: [float(rate.value) for rate in found] for n, found in rates.items()}
    decisions = scaling_over(
        values.pop(1), values, limit=case.limit("scaling").value, plan=SCALING_PLAN
    )
    name = "node_scaling_efficiency"
    return {
        n: (
            scaling.efficiency(name, rates[1], rates[n], one, note=f"of {n} nodes against one"),
            one,
        )
        for n, one in decisions.items()
    }


def _node_scaling(case: Case) -> Finding:
    """PASS if E of each number of nodes is; else it names the first that is not."""
    limit, found = case.limit("scaling"), _efficiencies(case)
    value_of = {n: float(measured.value) for n, (measured, _) in found.items()}
    told = ", ".join(f"{value:.3f} of {n} nodes" for n, value in value_of.items())
    if not limit.gated:
        short = [n for n, value in value_of.items() if not limit.holds(value)]
        where = f"; first below {limit.value:g} at {short[0]} nodes" if short else ""
        shown = found[(*short, case.context.nodes)[0]][0]
        return shown_only(shown, limit, f"E against one node: {told}{where}")
    outcomes = {n: decision.outcome.as_check for n, (_, decision) in found.items()}
    worst = min(found, key=lambda n: (outcomes[n].rank, n))
    if outcomes[worst] is Outcome.PASS:
        worst = min(found, key=lambda n: value_of[n])
    value, decision = found[worst]
    said = {
        Outcome.FAIL: f"first below {limit.value:g} at {worst} nodes",
        Outcome.INCONCLUSIVE: f"undecided from {worst} nodes on",
        Outcome.INVALID: f"not possible at {worst} nodes",
        Outcome.PASS: f"lowest at {worst} nodes",
    }[outcomes[worst]]
    reason = f"E against one node: {told}; {said}: {decision.reason}"
    return decided(decision, value, limit, reason=reason)


def node_scaling_table(case: Case) -> Table | None:
    """Each number of nodes with its throughput, and what that is of one node's."""
    if not scaling.numbers_of_nodes(case.context):
        return None
    found, rows = optional(partial(_efficiencies, case)) or {}, []
    for side in gather(optional(partial(_side, case, nodes)) for nodes in _numbers(case)):
        pooled = optional(partial(pooled_rate, side.case, side.names))
        value = found[side.nodes][0] if side.nodes in found else None
        ends = value.interval if value and value.interval else (None, None)
        of_one = (None if value is None else float(value.value), *ends)
        launches = ", ".join(side.case.launch(name).launch.id for name in side.names)
        rows.append(
            (
                *(side.nodes, side.ranks, cell(pooled)),
                *(None if one is None else round(one, 3) for one in of_one),
                launches if pooled else None,
            )
        )
    return Table(
        title="Throughput by number of nodes",
        columns=("nodes", "ranks", "tok/s", "E to one node", "at least", "at most", "launches"),
        rows=tuple(rows),
        note="tokens / time after warm-up, at one batch per rank; all nodes: the launches of the "
        "baseline",
    )
