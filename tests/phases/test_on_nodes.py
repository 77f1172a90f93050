"""Preflight on nodes: one that is absent, unlike the others or sick is named, no healthy one is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from math import ceil, log2
from typing import Any

import pytest

from nsa.contract import Ceiling
from phases.machine.nodes import node_rows, search
from runbook.config.registry import PlanContext
from runbook.records import Check, Confidence, LaunchStatus, RankExit
from runbook.records.evidence import Fact, PhaseEvidence
from tests.factory.tables import table
from tests.phases import builder, machine_files, spoil
from tests.phases.answers import says

FLOOR, FAST, SLOW = 1.0, 2.0, 0.5
PREFLIGHT = builder.PHASES["preflight"]
SUM = "the sum of all ranks is wrong"
# How a cluster is sick: is the all-reduce of these nodes slow, or wrong?
Sick = Callable[[frozenset[int]], bool]


def has(*nodes: int) -> Sick:
    """Every all-reduce is sick that one of these nodes takes part in."""
    return lambda group: bool(group & set(nodes))


def crosses(*side: int) -> Sick:
    """The switch between these nodes and all others is sick."""
    return lambda group: bool(group & set(side)) and bool(group - set(side))


def too_many(most: int) -> Sick:
    """More than so many nodes at once are slow, whichever they are."""
    return lambda group: len(group) > most


def where(nodes: int = 4, *, gated: bool = True) -> PlanContext:
    base, name = builder.on_nodes(nodes, "cpu"), "ceiling_all_reduce_gb_s"
    floor = base.profile.limits[name].model_copy(update={"value": FLOOR, "gated": gated})
    limits = {**base.profile.limits, name: floor}
    return replace(base, profile=base.profile.model_copy(update={"limits": limits}))


def names(nodes: int) -> list[str]:
    return [f"n{index}" for index in range(nodes)]


def looked_for(
    context: PlanContext, sick: Sick, *, wrong: bool = False, slow: float = SLOW, fast: float = FAST
) -> PhaseEvidence:
    """Preflight of a cluster that is so sick, with every launch that it asked for, in turn."""
    found = PhaseEvidence(launches={}, facts=facts(tuple(names(context.nodes))), earlier={})
    planned = {one.name: one for one in PREFLIGHT.plan(context) if one.kind == "ceilings"}
    wanted = ("ceilings",)
    while wanted:
        (name,) = wanted
        launch = planned.pop(name)
        bad = sick(frozenset(launch.on or range(context.nodes)))
        rate = slow if bad and not wrong else fast
        document = machine_files.document(launch, context.profile, all_reduce=rate)
        for rank in document["ranks"] if bad and wrong else ():
            rank["all_reduce"] = {**rank["all_reduce"], "wrong": SUM}
        made = replace(builder.healthy(launch, context.profile), ceilings=document)
        found = replace(found, launches={**found.launches, name: made})
        wanted = PREFLIGHT.needs_more(found, context)
    return found


def sick_node(found: PhaseEvidence, context: PlanContext) -> Check:
    return builder.row("preflight", "slow_node", found, context)


@pytest.mark.parametrize("wrong", [False, True], ids=["slow", "wrong"])
@pytest.mark.parametrize("nodes", [3, 4, 5, 8, 13])
def test_a_sick_node_is_named_after_log2_launches_and_one(nodes: int, wrong: bool) -> None:
    context = where(nodes, gated=not wrong)
    for place in {0, nodes // 2, nodes - 1}:
        found = looked_for(context, has(place), wrong=wrong)
        check = says(sick_node(found, context), "INVALID wrong_environment", "")
        assert check.reason.startswith(f"{'wrong' if wrong else 'slow'}: n{place} (")
        assert (check.nodes, check.confidence) == ((f"n{place}",), Confidence.CONFIRMED)
        assert len(found.launches) - 1 <= ceil(log2(nodes)) + 1
        measured = list(found.launches.values())[1:]
        # All others together were well, and with it some of them were not.
        others = set(range(nodes)) - {place}
        assert others in [set(one.launch.on) for one in measured]
        # By which a record of them is found to be as planned, whichever were needed.
        planned = [one.name for one in PREFLIGHT.plan(context)]
        assert [name for name in planned if name in found.launches] == list(found.launches)
        assert check.remedy.startswith("take the node")


@pytest.mark.parametrize("nodes", range(3, 9))
def test_however_many_are_sick_no_healthy_node_is_named(nodes: int) -> None:
    """Every set of two or more sick nodes, and every switch with two nodes or more on a side."""
    some = [one for size in range(2, nodes + 1) for one in combinations(range(nodes), size)]
    worlds = [too_many(most) for most in range(1, nodes)]
    worlds += [has(*one) for one in some] + [crosses(*one) for one in some if len(one) < nodes - 1]
    for sick in worlds:
        answers: dict[tuple[int, ...], bool] = {}
        while isinstance(step := search(nodes, answers), tuple):
            assert step not in answers and len(answers) <= ceil(log2(nodes))
            answers[step] = not sick(frozenset(step))
        assert step is None


@pytest.mark.parametrize(("sick", "wanted", "words"), [
    (has(0, 3), "INVALID wrong_environment", "no single node: several, their switch"),
    # Where all are too many, and all but one are not, every part is well.
    (too_many(3), "INCONCLUSIVE undecided", ""),
    (has(), "PASS ok", "none: all together reach 2 GB/s"),
])  # fmt: skip
def test_what_is_no_single_node_is_called_none(sick: Sick, wanted: str, words: str) -> None:
    context = where(4)
    check = says(sick_node(looked_for(context, sick), context), wanted, words)
    assert check.nodes == ()


def test_rates_that_lie_near_each_other_name_nobody() -> None:
    """0.85 of the fast ones is where cards of one kind are told apart."""
    context = where(8)
    fast = 1.01 * FLOOR
    for share, nodes in ((0.84, ("n5",)), (0.86, ()), (0.98, ())):
        check = sick_node(looked_for(context, has(5), slow=share * fast, fast=fast), context)
        assert check.nodes == nodes
        assert nodes or "are not 15% apart" in check.reason


def test_where_no_floor_decides_nothing_more_is_measured() -> None:
    found = looked_for(where(gated=False), has(2))
    assert list(found.launches) == ["ceilings"]
    says(sick_node(found, where(gated=False)), "SKIPPED not_gated")


def test_two_nodes_have_one_link_and_nobody_to_ask() -> None:
    assert "preflight.slow_node" not in PREFLIGHT.check_ids(where(2))
    assert not any(launch.conditional for launch in PREFLIGHT.plan(where(2)))
    assert len(looked_for(where(2), has(1)).launches) == 1


def test_a_search_that_was_cut_short_names_nobody() -> None:
    context = where(8)
    whole = looked_for(context, has(6))
    names = list(whole.launches)
    for last in range(1, len(names)):
        found = replace(whole, launches={name: whole.launches[name] for name in names[:last]})
        check = says(sick_node(found, context), "INCOMPLETE not_run", names[last])
        assert check.nodes == ()
        assert PREFLIGHT.needs_more(found, context) == (names[last],)
    first, second, third = names[:3]
    cut = {name: whole.launches[name] for name in (first, second)}
    cut[third] = spoil.ended(LaunchStatus.HUNG)(whole.launches[third])
    found = replace(whole, launches=cut)
    assert PREFLIGHT.needs_more(found, context) == ()
    says(sick_node(found, context), "INCOMPLETE hang", "no evidence")


def of_ranks(bad: tuple[int, ...], what: Ceiling, **changes: Any) -> PhaseEvidence:
    """Two ranks on each of four nodes; those in `bad` tell this of themselves."""
    context = where(4)
    found = looked_for(context, has())
    made = found.launches["ceilings"]
    exits = tuple(RankExit(rank=rank, code=0, node=f"n{rank}") for rank in range(4))
    assert made.ceilings is not None
    for rank in bad:
        made.ceilings["ranks"][rank][what] = {**made.ceilings["ranks"][rank][what], **changes}
    told = replace(made, result=made.result.model_copy(update={"ranks": exits}))
    return replace(found, launches={"ceilings": told})


@pytest.mark.parametrize(("bad", "named"), [((0, 3), ("n0", "n3")), ((0, 1, 2, 3), ())])
def test_a_rank_whose_own_result_is_wrong_names_its_node(
    bad: tuple[int, ...], named: tuple[str, ...]
) -> None:
    """Not where every node has one: that is no node's own."""
    found = of_ranks(bad, Ceiling.MATMUL, wrong="3 of 768 rows of an exact product are wrong")
    row = builder.row("preflight", "matmul", found, where(4))
    check = says(row, "INVALID wrong_environment", "3 of 768 rows")
    assert check.nodes == named
    assert check.confidence is (Confidence.CONFIRMED if named else Confidence.NONE)


@pytest.mark.parametrize("what", [Ceiling.ALL_REDUCE, Ceiling.LATENCY])
def test_a_wrong_sum_is_nobodys_own(what: Ceiling) -> None:
    found = of_ranks((0, 1, 2, 3), what, wrong=SUM)
    row = builder.row("preflight", "all_reduce", found, where(4))
    assert says(row, "INVALID wrong_environment", SUM).nodes == ()
    assert PREFLIGHT.needs_more(found, where(4)) == ("without_3_4",)


SAME: dict[str, object] = {
    "package.sha256": "ab12", "git.sha": "cd34", "torch.version": "2.13.0", "gpu.count": 0,
    **dict.fromkeys(("torch.cuda", "torch.nccl", "gpu.memory_total_mib", "gpu.names", "gpu.driver",
                     "gpu.pcie_gen", "gpu.pcie_width", "gpu.nvlink", "gpu.mig", "gpu.power_limit")),
    "infiniband.present": False, "cpu.count": 2, "disk.write_mib_s": 700.0, "clock.offset_s": 0.0,
}  # fmt: skip


def fact(name: str, value: Any, note: str = "") -> Fact:
    return Fact(name=name, value=value, path="host.json", sha256="ab" * 32, note=note)


def facts(nodes: tuple[str, ...]) -> dict[str, Fact]:
    """Those of equal nodes."""
    each = {f"{name}@{node}": value for node in nodes for name, value in SAME.items()}
    found = {own: fact(own, value, "" if value else "none here") for own, value in each.items()}
    return {"nodes.names": fact("nodes.names", ", ".join(nodes)), **found}


@table(__file__, "unlike_nodes")
def test_a_node_that_differs_is_named(
    row: str, nodes: int, known: dict[str, Any], wanted: Any, words: str
) -> None:
    where = builder.on_nodes(nodes, "cpu")
    if row == "interconnect":  # the profile needs it
        linked = where.profile.hardware.model_copy(update={"interconnect": "infiniband"})
        profile = where.profile.model_copy(update={"hardware": linked})
        where = replace(where, profile=profile)
    found = builder.evidence("preflight", where)
    of_nodes = {**facts(tuple(names(nodes))), **{k: fact(k, *v) for k, v in known.items()}}
    found = replace(found, facts={**found.facts, **of_nodes})
    check = says(builder.row("preflight", row, found, where), wanted, words)
    if wanted == "INVALID wrong_environment":
        assert check.remedy.startswith("take the node that the message names out")
        assert f"--launcher slurm --nodes {nodes}" in check.rerun


def test_where_no_node_could_be_asked_every_other_row_follows_from_that() -> None:
    where = builder.on_nodes(2, "cpu")
    unknown = {"nodes.names": fact("nodes.names", None, "the job was refused")}
    found = replace(builder.evidence("preflight", where), facts=unknown)
    for row in ("torch", "disk_free", "branch", "variables"):
        assert builder.row("preflight", row, found, where).follows == "preflight.nodes", row
    known = replace(found, facts={"nodes.names": fact("nodes.names", "n0, n1")})
    assert not builder.row("preflight", "torch", known, where).follows


def test_one_machine_has_none_of_these_rows() -> None:
    alone = PREFLIGHT.check_ids(builder.context("cpu"))
    more = set(PREFLIGHT.check_ids(builder.on_nodes(2, "cpu"))) - set(alone)
    assert more == {f"preflight.{one.what}" for one in node_rows()}
