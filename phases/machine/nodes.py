"""Rows about the nodes of a run that is spread over several: are they there, alike, and linked?

A node that differs makes every number of the run one of a mixture, so it is INVALID and named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from nsa.contract import Ceiling
from phases.kit import CLOCKS_APART_S, CLOCKS_EXACT_S
from phases.kit.case import Case
from phases.kit.commands import ceilings_launch
from phases.kit.finding import Finding, inconclusive, invalid, missing, passed, skipped, warned
from phases.kit.rows import Row, RowsOf
from phases.machine.ceilings import as_measurement, measured
from runbook.config.phase import PlanContext
from runbook.records import Launch, Measurement, Reason
from runbook.records.evidence import Fact, LaunchEvidence
from runbook.records.run import NODE_NAMES

# Facts of which another value is another machine, and what a person calls them.
_ALIKE = {
    "package.sha256": "code of nsa",
    "git.sha": "commit",
    "torch.version": "torch",
    "torch.cuda": "CUDA of torch",
    "torch.nccl": "NCCL",
    "gpu.count": "GPUs",
    "gpu.names": "GPU",
    "gpu.driver": "driver",
    "gpu.memory_total_mib": "GPU memory",
    "gpu.pcie_gen": "PCIe generation",
    "gpu.pcie_width": "PCIe width",
    "gpu.nvlink": "NVLink",
    "gpu.mig": "MIG",
    "gpu.power_limit": "power limit",
    "infiniband.present": "InfiniBand",
    "cpu.count": "CPUs",
}
_CLOCK = "clock.offset_s"
_WRITES = "disk.write_mib_s"


def node_rows() -> tuple[Row, ...]:
    """The rows of preflight that a run on nodes of a cluster has."""
    answers = {
        "nodes": _nodes,
        "nodes_alike": _alike,
        "interconnect": _interconnect,
        "node_clocks": _clocks,
    }
    return tuple(RowsOf("preflight").one(what, answer) for what, answer in answers.items())


def other_nodes(launch: LaunchEvidence, env: Mapping[str, Any]) -> list[str]:
    """Where a launch ran on another number of nodes than planned, by either of two sources.

    torchrun's agents that met, as the trainer was told; and those of the harness, which looked at
    the devices of their nodes.
    """
    wanted, problems = launch.launch.nodes, []
    if (wanted > 1 or "nodes" in env) and env.get("nodes") != wanted:
        problems.append(f"nodes: wanted {wanted}, got {env.get('nodes')}")
    seen = (launch.devices_before or {}).get("nodes")
    if (wanted > 1 or seen) and len(seen or ()) != wanted:
        names = f" ({', '.join(seen)})" if seen else ""
        problems.append(f"nodes with an agent: wanted {wanted}, found {len(seen or ())}{names}")
    return problems


def _names(case: Case) -> tuple[list[str], Measurement]:
    value = case.known(NODE_NAMES)
    return str(value.value).split(", "), value


def _of_nodes(case: Case, name: str) -> dict[str, Fact]:
    """The fact of each node. Raises a finding if a node did not tell it."""
    names, _ = _names(case)
    return {node: case.fact(f"{name}@{node}") for node in names}


def _nodes(case: Case) -> Finding:
    names, value = _names(case)
    wanted = case.context.nodes
    text = f"{len(names)}: {', '.join(names)}"
    if len(names) != wanted:
        return _wrong(f"{text}; asked for were {wanted}", value)
    slow = min(
        (fact for fact in _of_nodes(case, _WRITES).values() if isinstance(fact.value, float)),
        key=lambda fact: float(fact.value or 0.0),
        default=None,
    )
    disk = f"; {slow.name.partition('@')[2]} writes slowest: {slow.value:.0f} MiB/s" if slow else ""
    return passed(f"{text}{disk}", measurement=value)


def _alike(case: Case) -> Finding:
    names, value = _names(case)
    found = []
    for name, word in _ALIKE.items():
        said = {node: fact.value for node, fact in _of_nodes(case, name).items()}
        found += _odd_ones(said, word)
    if found:
        return _wrong("; ".join(found), value)
    return passed(f"{len(_ALIKE)} facts are the same on {', '.join(names)}", measurement=value)


def _odd_ones(said: dict[str, str | float | bool | None], word: str) -> list[str]:
    """`driver: n1 has 550.1, n0 has 550.2`; with a majority only the others are named."""
    counts = Counter(said.values()).most_common()
    if len(counts) < 2:
        return []
    usual, times = counts[0]
    others = [f"{node} has {value}" for node, value in said.items() if value != usual]
    first = next(node for node, value in said.items() if value == usual)
    rest = "the others have" if times > counts[1][1] else f"{first} has"
    return [f"{word}: {', '.join(others)}, {rest} {usual}"]


def _interconnect(case: Case) -> Finding:
    names, value = _names(case)
    wanted = case.profile.hardware.interconnect
    has = {node: bool(fact.value) for node, fact in _of_nodes(case, "infiniband.present").items()}
    without = [node for node in names if not has[node]]
    kind = "no InfiniBand" if len(without) == len(names) else "InfiniBand"
    if wanted == "infiniband" and without:
        return _wrong(f"no InfiniBand on {', '.join(without)}; the profile needs it", value)
    rest = "" if wanted else "; the profile asks for none in particular"
    return passed(f"{kind} between {', '.join(names)}{rest}", measurement=value)


def _clocks(case: Case) -> Finding:
    """Apart by more than a second is INVALID; a little makes lateness between nodes uncertain."""
    offsets = {node: fact.value for node, fact in _of_nodes(case, _CLOCK).items()}
    known = {node: float(s) for node, s in offsets.items() if isinstance(s, float | int)}
    _, value = _names(case)
    if len(known) < len(offsets):
        silent = sorted(set(offsets) - set(known))
        raise missing(f"the clock of {', '.join(silent)} is unknown")
    first, last = min(known, key=lambda n: known[n]), max(known, key=lambda n: known[n])
    apart_s = known[last] - known[first]
    text = f"{apart_s:.3f} s between {first} and {last}" if first != last else "one node"
    if apart_s > CLOCKS_APART_S:
        return _wrong(f"clocks are {text} apart", value)
    if apart_s > CLOCKS_EXACT_S:
        return warned(f"{text}: who is late between nodes is uncertain by that", measurement=value)
    return passed(text, measurement=value)


def _wrong(reason: str, value: Measurement) -> Finding:
    return invalid(Reason.WRONG_ENVIRONMENT, reason, measurement=value, topic="nodes")


# -- which node is slow, where all of them together exchange gradients too slowly ------------------
#
# The first node with each other one, and the second with the third: as many measurements as there
# are nodes. A slow node is in every slow pair; if it is the first, the last pair is the only fast
# one.

# Of two nodes that share one link nobody can say which one is slow.
_FEWEST_NODES = 3


def pairs(context: PlanContext) -> list[tuple[int, int]]:
    """The pairs that are measured, as places in the run's list of nodes."""
    every = [*((0, other) for other in range(1, context.nodes)), (1, 2)]
    return every if context.nodes >= _FEWEST_NODES else []


def pair_launches(context: PlanContext, phase: str) -> list[Launch]:
    """The all-reduce between two nodes, for each pair; they start only if it is needed."""
    return [
        ceilings_launch(
            context,
            phase=phase,
            name=_pair_name(pair),
            purpose=f"all-reduce between nodes {pair[0] + 1} and {pair[1] + 1}",
            on=pair,
        )
        for pair in pairs(context)
    ]


def falls_short(case: Case) -> bool:
    """Do all nodes together exchange gradients more slowly than the profile allows?"""
    limit = case.limit("ceiling_all_reduce_gb_s")
    try:
        slowest = measured(case, Ceiling.ALL_REDUCE)[0]
    except Finding:
        return False
    return limit.gated and not limit.holds(slowest.rate)


def pair_rows(context: PlanContext) -> tuple[Row, ...]:
    """The row that names a slow node, where there are enough of them."""
    return (RowsOf("preflight").one("slow_node", _slow_node),) if pairs(context) else ()


def _pair_name(pair: tuple[int, int]) -> str:
    return f"pair_{pair[0] + 1}_{pair[1] + 1}"


def _slow_node(case: Case) -> Finding:
    whole = measured(case, Ceiling.ALL_REDUCE)[0]
    value = as_measurement(case, Ceiling.ALL_REDUCE, whole)
    limit = case.limit("ceiling_all_reduce_gb_s")
    if not limit.gated:
        return skipped(Reason.NOT_GATED, "no floor decides on this profile", measurement=value)
    if not falls_short(case):
        return passed(f"none: all together reach {whole.rate:.4g} {whole.unit}", measurement=value)
    names, _ = _names(case)
    rates = {
        pair: measured(case, Ceiling.ALL_REDUCE, _pair_name(pair))[0].rate
        for pair in pairs(case.context)
    }
    slow = {pair for pair, rate in rates.items() if not limit.holds(rate)}
    told = ", ".join(f"{names[a]}-{names[b]} {rate:.4g}" for (a, b), rate in rates.items())
    text = f"{told} {whole.unit}, the floor is {limit.value:g}; all together {whole.rate:.4g}"
    culprits = _culprits(slow, len(names))
    if culprits:
        which = ", ".join(names[place] for place in culprits)
        return _wrong(f"slow: {which} ({text})", value)
    if slow:
        return _wrong(f"no single node: its switch, or a setting ({text})", value)
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
