"""Rows about the nodes of a run that is spread over several: are they there, alike, and linked?

A node that differs makes every number of the run one of a mixture, so it is INVALID and named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from phases.kit import CLOCKS_APART_S, CLOCKS_EXACT_S
from phases.kit.case import Case
from phases.kit.finding import Finding, invalid, missing, passed, warned
from phases.kit.rows import Row, RowsOf
from runbook.records import Confidence, Measurement, Reason
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


def node_names(case: Case) -> tuple[list[str], Measurement]:
    """The nodes of the run in the order of their places, and the fact that has them."""
    value = case.known(NODE_NAMES)
    return str(value.value).split(", "), value


def _of_nodes(case: Case, name: str) -> dict[str, Fact]:
    """The fact of each node. Raises a finding if a node did not tell it."""
    names, _ = node_names(case)
    return {node: case.fact(f"{name}@{node}") for node in names}


def _nodes(case: Case) -> Finding:
    names, value = node_names(case)
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
    names, value = node_names(case)
    found, odd = [], dict[str, None]()
    for name, word in _ALIKE.items():
        said = {node: fact.value for node, fact in _of_nodes(case, name).items()}
        text, nodes = _odd_ones(said, word)
        found += text
        odd |= dict.fromkeys(nodes)
    if found:
        return _wrong("; ".join(found), value, nodes=tuple(odd))
    return passed(f"{len(_ALIKE)} facts are the same on {', '.join(names)}", measurement=value)


def _odd_ones(said: dict[str, str | float | bool | None], word: str) -> tuple[list[str], list[str]]:
    """`driver: n1 has 550.1, n0 has 550.2`; the second has the odd ones, if most are alike."""
    counts = Counter(said.values()).most_common()
    if len(counts) < 2:
        return [], []
    usual, times = counts[0]
    odd = [node for node, value in said.items() if value != usual]
    others = ", ".join(f"{node} has {said[node]}" for node in odd)
    first = next(node for node, value in said.items() if value == usual)
    most = 2 * times > len(said)
    text = f"{word}: {others}, {'the others have' if most else f'{first} has'} {usual}"
    return [text], odd if most else []


def _interconnect(case: Case) -> Finding:
    names, value = node_names(case)
    wanted = case.profile.hardware.interconnect
    has = {node: bool(fact.value) for node, fact in _of_nodes(case, "infiniband.present").items()}
    without = [node for node in names if not has[node]]
    kind = "no InfiniBand" if len(without) == len(names) else "InfiniBand"
    if wanted == "infiniband" and without:
        text = f"no InfiniBand on {', '.join(without)}; the profile needs it"
        return _wrong(text, value, nodes=without if len(without) < len(names) else ())
    rest = "" if wanted else "; the profile asks for none in particular"
    return passed(f"{kind} between {', '.join(names)}{rest}", measurement=value)


def _clocks(case: Case) -> Finding:
    """Apart by more than a second is INVALID; a little makes lateness between nodes uncertain."""
    offsets = {node: fact.value for node, fact in _of_nodes(case, _CLOCK).items()}
    known = {node: float(s) for node, s in offsets.items() if isinstance(s, float | int)}
    _, value = node_names(case)
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


def _wrong(reason: str, value: Measurement, *, nodes: Sequence[str] = ()) -> Finding:
    """INVALID; `nodes` are those that differ from most, as they say themselves."""
    sure = Confidence.REPORTED if nodes else Confidence.NONE
    found = invalid(Reason.WRONG_ENVIRONMENT, reason, measurement=value, topic="nodes")
    return replace(found, nodes=nodes, confidence=sure)
