"""What each further node adds: E = T_n / (n x T of one whole node), at one batch per rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from phases.compare.compared import efficiencies_compared, efficiency_row
from phases.compare.curves import marks
from phases.compare.rates import cell, launch_rates, pooled_rate
from phases.compare.subsets import ONE_RANK, case_of, numbers_of_nodes, of_nodes, unlike_baseline
from phases.kit.case import Case, Finding, Unanswerable, gather, invalid, optional
from phases.kit.limits import SCALING
from phases.kit.measure import decided, derived, shown_only, with_limit
from phases.kit.rows import Row
from phases.machine.nodes import other_nodes
from phases.training.training import require_sound
from runbook.config.phase import PlanContext
from runbook.records import Comparison, Measurement, Outcome, Reason, Table
from runbook.stats.decision import Decision
from runbook.stats.launches import launch_bounds, scaling_over
from runbook.stats.plans import SCALING_PLAN

NODE_SCALING = "node_scaling"


def node_scaling_rows(context: PlanContext) -> tuple[Row, ...]:
    """The row of a run on several nodes, where launches on fewer of them say anything new."""
    if not numbers_of_nodes(context):
        return ()
    question = "Is scaling near-linear over 1, 2, 4, ... nodes, each with all of its ranks?"
    return (Row(NODE_SCALING, question, _node_scaling, topic="node_scaling"),)


@dataclass(frozen=True, kw_only=True)
class _Side:
    """The launches on so many nodes with so many ranks, and the case that they are read from."""

    nodes: int
    ranks: int
    case: Case
    names: Sequence[str]


def _side(case: Case, nodes: int) -> _Side:
    """The launches on so many nodes; those on all of them are the baseline's."""
    if nodes == case.context.nodes:
        before = case.earlier("baseline")
        names = list(before.evidence.launches)
        return _Side(nodes=nodes, ranks=case.profile.ranks, case=before, names=names)
    subset = of_nodes(case.context, nodes)
    one, planned = case_of(case, subset)
    return _Side(nodes=nodes, ranks=subset.ranks, case=one, names=planned)


def _sides(case: Case) -> dict[int, _Side]:
    """By number of nodes what was measured, the smallest number first."""
    return {nodes: _side(case, nodes) for nodes in _numbers(case)}


def _numbers(case: Case) -> tuple[int, ...]:
    return (*numbers_of_nodes(case.context), case.context.nodes)


def _require_comparable(case: Case, sides: Mapping[int, _Side]) -> None:
    """Raise Unanswerable where a launch ran on other nodes than planned, unsound, or unlike."""
    for side in sides.values():
        for name in side.names:
            launch = side.case.completed(name)
            if problems := other_nodes(launch, side.case.env(name)):
                reason = f"{launch.launch.id}: {'; '.join(problems)}"
                paths = (launch.env_path, launch.devices_before_path)
                raise Unanswerable(
                    invalid(Reason.MISMATCH, reason, evidence=paths, topic="plausible")
                )
        if side.nodes < case.context.nodes:
            require_sound(side.case, side.names)
            if unlike := unlike_baseline(case, side.names):
                raise Unanswerable(unlike)


def _efficiencies(case: Case) -> dict[int, tuple[Measurement, Decision]]:
    """By number of nodes E against one whole node, and what it decides."""

    sides = _sides(case)
    _require_comparable(case, sides)
    rounds = min(len(side.names) for side in sides.values())
    rates = {n: launch_rates(side.case, side.names)[:rounds] for n, side in sides.items()}
    values = {n: [float(rate.value) for rate in found] for n, found in rates.items()}
    decisions = scaling_over(
        values.pop(1), values, limit=case.limit(SCALING).value, plan=SCALING_PLAN
    )
    return {n: (_measurement(rates, n, one), one) for n, one in decisions.items()}


def _measurement(
    rates: Mapping[int, Sequence[Measurement]], nodes: int, decision: Decision
) -> Measurement:
    return derived(
        rates[nodes][0],
        name="node_scaling_efficiency",
        value=float(decision.estimate or 0.0),
        unit="",
        n=decision.n,
        interval=decision.interval,
        note=f"of {nodes} nodes against one",
        also=[*rates[nodes], *rates[1]],
    )


def _node_scaling(case: Case) -> Finding:
    """PASS if E of each number of nodes is; else it names the first that is not."""
    limit, found = case.limit(SCALING), _efficiencies(case)
    told = ", ".join(f"{float(value.value):.3f} of {n} nodes" for n, (value, _) in found.items())
    if not case.gates_throughput(limit):
        short = [n for n, (value, _) in found.items() if not limit.holds(float(value.value))]
        where = f"; first below {limit.value:g} at {short[0]} nodes" if short else ""
        value, _ = found[(*short, case.context.nodes)[0]]
        return shown_only(value, limit, f"E against one node: {told}{where}")
    outcomes = {n: decision.outcome.as_check for n, (_, decision) in found.items()}
    worst = min(found, key=lambda n: (outcomes[n].rank, n))
    if outcomes[worst] is Outcome.PASS:
        worst = min(found, key=lambda n: float(found[n][0].value))
    value, decision = found[worst]
    said = {
        Outcome.FAIL: f"first below {limit.value:g} at {worst} nodes",
        Outcome.INCONCLUSIVE: f"undecided from {worst} nodes on",
        Outcome.INVALID: f"not possible at {worst} nodes",
        Outcome.PASS: f"lowest at {worst} nodes",
    }[outcomes[worst]]
    reason = f"E against one node: {told}; {said}: {decision.reason}"
    return replace(with_limit(decided(decision, value), value, limit), reason=reason)


def node_scaling_table(case: Case) -> Table | None:
    """Each number of nodes with its throughput, and what that is of one node's and one rank's."""
    if not numbers_of_nodes(case.context):
        return None
    one, names = case_of(case, ONE_RANK)
    single = optional(partial(pooled_rate, one, names))
    found = optional(partial(_efficiencies, case)) or {}
    sides = gather(optional(partial(_side, case, nodes)) for nodes in _numbers(case))
    rows = [_row(side, found.get(side.nodes), single) for side in sides]
    if sides[0].ranks > 1:
        rows.insert(0, _row(_Side(nodes=1, ranks=1, case=one, names=names), None, single))
    return Table(
        title="Throughput by number of nodes",
        columns=(
            *("nodes", "ranks", "tok/s", "interval of tok/s", "E to one node", "interval of E"),
            *("E to one rank", "launches"),
        ),
        rows=tuple(rows),
        note="tokens / time after warm-up, mean of the launches with its 90 % interval, at one "
        "batch per rank; all nodes: the launches of the baseline",
    )


def _row(
    side: _Side, found: tuple[Measurement, Decision] | None, single: Measurement | None
) -> tuple[int | float | str | None, ...]:
    pooled = optional(partial(pooled_rate, side.case, side.names))
    each = None
    if pooled is not None and single is not None:
        each = round(float(pooled.value) / (side.ranks * float(single.value)), 3)
    value = found[0] if found else None
    return (
        *(side.nodes, side.ranks, cell(pooled), optional(partial(_bounds, side))),
        round(float(value.value), 3) if value else None,
        f"{value.interval[0]:.3f} to {value.interval[1]:.3f}" if value and value.interval else None,
        each,
        ", ".join(side.case.launch(name).launch.id for name in side.names) if pooled else None,
    )


def _bounds(side: _Side) -> str | None:

    values = [float(rate.value) for rate in launch_rates(side.case, side.names)]
    if len(values) < 2:
        return None
    low, high = launch_bounds(values)
    return f"{low:.1f} to {high:.1f}"


def node_scaling_compared(case: Case, phase: str) -> Comparison | None:
    """E of each number of nodes, round by round, against the floor where it decides."""
    if not numbers_of_nodes(case.context):
        return None
    limit, sides, found = case.limit(SCALING), _sides(case), _efficiencies(case)
    gated = case.gates_throughput(limit)
    rates = {n: launch_rates(side.case, side.names) for n, side in sides.items()}
    rounds = min(map(len, rates.values()))
    rows = [
        efficiency_row(
            f"{n} nodes", rates[n][:rounds], rates[1][:rounds], value, ranks=n, decides=gated
        )
        for n, (value, _) in found.items()
    ]
    return efficiencies_compared(
        rows,
        check=f"{phase}.{NODE_SCALING}",
        title="Scaling efficiency E against one node, round by round",
        each="one round",
        floor=marks(limit, "floor") if gated else (),
    )
