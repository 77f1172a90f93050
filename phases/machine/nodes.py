"""Rows about the nodes of a run that is spread over several: are they there, alike, and linked?

A node that differs makes every number of the run one of a mixture, so it is INVALID and named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from nsa.contract import Ceiling
from phases.kit import CARDS_ALIKE, CLOCKS_APART_S, CLOCKS_EXACT_S, table
from phases.kit.case import Case, optional
from phases.kit.commands import ceilings_launch
from phases.kit.finding import Finding, inconclusive, invalid, missing, passed, skipped, warned
from phases.kit.rows import Row, RowsOf
from phases.machine.ceilings import LAUNCH, as_measurement, measured
from runbook.config.registry import PlanContext
from runbook.records import Confidence, Launch, Measurement, Reason
from runbook.records.evidence import Fact, LaunchEvidence
from runbook.records.run import NODE_NAMES

_CLOCK = "clock.offset_s"


def node_rows() -> tuple[Row, ...]:
    """The rows of preflight that a run on nodes of a cluster has."""
    answers = {
        "nodes": _nodes,
        "nodes_alike": _alike,
        "interconnect": _interconnect,
        "node_clocks": _clocks,
    }
    return tuple(RowsOf("preflight").one(what, answer) for what, answer in answers.items())


def other_nodes(launch: LaunchEvidence, env: Mapping[str, Any]) -> Iterator[str]:
    """Where a launch ran on another number of nodes than planned, by either of two sources.

    torchrun's agents that met, as the trainer was told; and those of the harness, which looked at
    the devices of their nodes.
    """
    wanted = launch.launch.nodes
    if (wanted > 1 or "nodes" in env) and env.get("nodes") != wanted:
        yield f"nodes: wanted {wanted}, got {env.get('nodes')}"
    seen = (launch.devices_before or {}).get("nodes")
    if (wanted > 1 or seen) and len(seen or ()) != wanted:
        names = f" ({', '.join(seen)})" if seen else ""
        yield f"nodes with an agent: wanted {wanted}, found {len(seen or ())}{names}"


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
    return passed(text, measurement=value)


def _alike(case: Case) -> Finding:
    names, value = node_names(case)
    facts, found, odd = table("alike")["nodes"], [], dict[str, None]()
    for name, word in facts.items():
        said = {node: fact.value for node, fact in _of_nodes(case, name).items()}
        text, nodes = _odd_ones(said, word)
        found += text
        odd |= dict.fromkeys(nodes)
    if found:
        return _wrong("; ".join(found), value, nodes=tuple(odd))
    return passed(f"{len(facts)} facts are the same on {', '.join(names)}", measurement=value)


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


# -- which node slows or spoils the all-reduce of all: a bisection over the nodes -----------------
#
# It begins where all nodes together fall short, and takes at most log2(n) + 1 launches:
#
# 1. Of the suspects, at first all nodes, the upper half is left out, and all others are measured.
#    If these are well, the sick node is among those left out, else among the suspects that took
#    part. So on until one suspect is left: log2(n) launches, each of at least half of the nodes,
#    none of one node alone.
# 2. A node is named only where all others are well together, and where some of them with it are
#    not: the first excludes a second sick node and a switch, the second that it is only their
#    number. One of the two is known by then; the last launch is the other one, the suspect with a
#    healthy node where every launch so far was well.
# 3. Anything else is no single node, or undecided. So are rates too near each other to be told
#    apart.
#
# The answers are read from the launches' own documents, so that the same code says which launch is
# next and, afterwards, what they mean. The fault has to stay for the minutes that this takes: one
# that comes and goes may mislead it. A link that is sick between two nodes alone names one of them.

# Of two nodes that share one link nobody can say which one is sick.
_FEWEST_NODES = 3
_FLOOR = "ceiling_all_reduce_gb_s"

# Places of nodes in the run's list of them, rising.
Group = tuple[int, ...]


def search(count: int, well: Mapping[Group, bool]) -> Group | int | None:
    """The group of `count` nodes that is measured next, the sick node, or None: no single one.

    All of them together are not well; `well` has the answers so far, of groups that it asked for.
    """
    every, low, high = tuple(range(count)), 0, count
    while high - low > 1:
        middle = (low + high + 1) // 2
        others = every[:middle] + every[high:]
        if others not in well:
            return others
        low, high = (middle, high) if well[others] else (low, middle)
    others = every[:low] + every[high:]
    if others not in well:
        return others
    if not well[others]:
        return None
    if not all(is_well for group, is_well in well.items() if low in group):
        return low
    # Left out each time: it is the last one, and the first one was always well.
    pair = (0, low)
    return None if pair in well else pair


def groups(count: int) -> list[Group]:
    """Every group that a search among so many nodes can ask for, in the order of asking."""
    found: dict[Group, None] = {}
    asked: list[dict[Group, bool]] = [{}] if count >= _FEWEST_NODES else []
    while asked:
        steps = [(well, search(count, well)) for well in asked]
        more = [(well, step) for well, step in steps if isinstance(step, tuple)]
        found |= dict.fromkeys(step for _, step in more)
        asked = [well | {step: is_well} for well, step in more for is_well in (True, False)]
    return list(found)


def _name(group: Group, count: int) -> str:
    """`without_5_8` by the places of those left out, counted from one; `pair_1_8`."""
    if len(group) < count / 2:
        return f"pair_1_{count}"
    left = [place + 1 for place in range(count) if place not in group]
    return f"without_{left[0]}" + (f"_{left[-1]}" if len(left) > 1 else "")


def group_launches(context: PlanContext, phase: str) -> list[Launch]:
    """The all-reduce of each group; they start only as the search asks for them."""
    count = context.nodes
    return [
        ceilings_launch(
            context,
            phase=phase,
            name=_name(group, count),
            purpose=f"all-reduce of {len(group)} of {count} nodes, to find a sick one",
            on=group,
        )
        for group in groups(count)
    ]


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """What an all-reduce reached, what is wrong with its results, and whether both are fine."""

    wrong: str
    well: bool
    value: Measurement

    def __str__(self) -> str:
        return self.wrong or f"{self.value.value:.4g} {self.value.unit}"


def _answer(case: Case, name: str = LAUNCH) -> _Answer:
    """Of a launch. Raises a finding where it has no usable numbers."""
    case.completed(name)
    limit, found = case.limit(_FLOOR), measured(case, Ceiling.ALL_REDUCE, name)
    ranks = (*found, *measured(case, Ceiling.LATENCY, name))
    wrong = next((one.wrong for one in ranks if one.wrong), "")
    return _Answer(
        wrong=wrong,
        well=not wrong and (not limit.gated or limit.holds(found[0].rate)),
        value=as_measurement(case, Ceiling.ALL_REDUCE, found[0], name),
    )


def _searched(case: Case) -> tuple[dict[Group, _Answer], Group | int | None]:
    """The answers of the launches that there are, and where the search is with them."""
    count, found = case.context.nodes, dict[Group, _Answer]()
    while True:
        step = search(count, {group: one.well for group, one in found.items()})
        if not isinstance(step, tuple) or _name(step, count) not in case.evidence.launches:
            return found, step
        found[step] = _answer(case, _name(step, count))


def next_launch(case: Case) -> tuple[str, ...]:
    """The name of the launch that is needed next, where all nodes together fall short."""
    whole = optional(lambda: _answer(case))
    if whole is None or whole.well or case.context.nodes < _FEWEST_NODES:
        return ()
    searched = optional(lambda: _searched(case))
    step = searched[1] if searched else None
    return (_name(step, case.context.nodes),) if isinstance(step, tuple) else ()


def bisection_rows(context: PlanContext) -> tuple[Row, ...]:
    """The row that names a sick node, where there are enough of them."""
    many = context.nodes >= _FEWEST_NODES
    return (RowsOf("preflight").one("slow_node", _sick_node),) if many else ()


def _sick_node(case: Case) -> Finding:
    whole, limit = _answer(case), case.limit(_FLOOR)
    if whole.well and not limit.gated:
        return skipped(
            Reason.NOT_GATED, "no floor decides on this profile", measurement=whole.value
        )
    if whole.well:
        return passed(f"none: all together reach {whole}", measurement=whole.value)
    (names, _), (found, step) = node_names(case), _searched(case)
    if isinstance(step, tuple):
        case.completed(_name(step, case.context.nodes))
    if len(names) != case.context.nodes:
        raise missing(f"the names of {len(names)} nodes are known, of {case.context.nodes}")
    told = ", ".join(f"{_in_words(names, group)} {one}" for group, one in found.items())
    text = f"all together {whole}, {told}{f'; the floor is {limit.value:g}' if limit.gated else ''}"
    files = [one.value.path for one in found.values()]
    undecided = partial(inconclusive, Reason.UNDECIDED, measurement=whole.value, evidence=files)
    sick = partial(invalid, Reason.WRONG_ENVIRONMENT, measurement=whole.value, evidence=files)
    fast = [float(one.value.value) for one in found.values() if one.well]
    others = [one.value for one in (whole, *found.values()) if not one.well and not one.wrong]
    slow = [float(one.value) for one in others]
    if all(one.well for one in found.values()):
        return undecided(f"every part is well, not the whole ({text})")
    if fast and slow and max(slow) > CARDS_ALIKE * min(fast):
        return undecided(f"slow and fast are not {1 - CARDS_ALIKE:.0%} apart ({text})")
    if not isinstance(step, int):
        return sick(f"no single node: several, their switch, or a setting ({text})")
    reason = f"{'wrong' if whole.wrong else 'slow'}: {names[step]} ({text})"
    title = f"node {names[step]} {'spoils' if whole.wrong else 'slows'} the all-reduce of all nodes"
    return sick(reason, title=title, nodes=(names[step],), confidence=Confidence.CONFIRMED)


def _in_words(names: Sequence[str], group: Group) -> str:
    """`without n4, n5`, or `n0 with n7`."""
    left = [name for place, name in enumerate(names) if place not in group]
    pair = len(group) < len(left)
    return " with ".join(names[i] for i in group) if pair else f"without {', '.join(left)}"
