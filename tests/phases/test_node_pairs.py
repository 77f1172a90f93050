"""Where nodes exchange gradients too slowly, pairs of them tell which one is slow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nsa.contract import Ceiling
from phases.kit.limits import CEILING_ALL_REDUCE
from phases.machine.node_pairs import pairs
from runbook import registry
from runbook.config.load import load_profile
from runbook.records import Check, Outcome, Reason
from runbook.records.evidence import LaunchEvidence, PhaseEvidence
from runbook.records.phase import PlanContext
from runbook.records.run import Invocation
from tests.phases import builder, ceiling_files
from tests.phases.answers import said
from tests.phases.test_nodes import facts

FLOOR, FAST, SLOW = 1.0, 2.0, 0.5
PREFLIGHT = registry.phases()["preflight"]
NAMES = ("n0", "n1", "n2", "n3")


def where(nodes: int = 4, *, gated: bool = True) -> PlanContext:
    profile = load_profile("cpu")
    limit = profile.limits[CEILING_ALL_REDUCE.name]
    floor = limit.model_copy(update={"value": FLOOR, "gated": gated})
    limits = {**profile.limits, CEILING_ALL_REDUCE.name: floor}
    return PlanContext(
        profile=profile.model_copy(update={"ranks": nodes, "limits": limits}),
        nodes=nodes,
        invocation=Invocation(profile="cpu", launcher="slurm", nodes=nodes),
    )


def seen(rates: dict[str, float], context: PlanContext, *, ran: bool = True) -> PhaseEvidence:
    """Preflight in which the all-reduce of each launch has a rate; FAST unless given."""

    def change(made: LaunchEvidence) -> LaunchEvidence:
        rate = rates.get(made.launch.name, FAST)
        document = ceiling_files.document(made.launch, context.profile, all_reduce=rate)
        # The helper's times are those between two ranks.
        more = 2 * (made.launch.nproc - 1) / made.launch.nproc
        for rank in document["ranks"]:
            for what in (Ceiling.ALL_REDUCE, Ceiling.LATENCY):
                one = rank[what] = dict(rank[what])
                one["seconds"] = [second * more for second in one["seconds"]]
                one["host_s"] *= more
        return replace(made, ceilings=document)

    measured = ["ceilings", *(f"pair_{a + 1}_{b + 1}" for a, b in pairs(context))]
    found = builder.evidence("preflight", context, change=change, only=measured, conditional=ran)
    return replace(found, facts={**found.facts, **facts(NAMES[: context.nodes])})


def slow_node(rates: dict[str, float], context: PlanContext) -> Check:
    return builder.row("preflight", "slow_node", seen(rates, context), context)


def test_every_node_is_measured_with_the_first_and_one_pair_without_it() -> None:
    planned = [launch for launch in PREFLIGHT.plan(where()) if launch.conditional]
    assert [launch.on for launch in planned] == [(0, 1), (0, 2), (0, 3), (1, 2)]
    for launch in planned:
        assert (launch.nodes, launch.nproc) == (2, 2)
        assert launch.argv[:3] == ("torchrun", "--nnodes=2", "--nproc_per_node=1")


def test_pairs_are_measured_only_where_all_together_fall_short() -> None:
    context = where()
    assert not PREFLIGHT.needs_more(seen({}, context, ran=False), context)
    short = seen({"ceilings": SLOW}, context, ran=False)
    assert PREFLIGHT.needs_more(short, context)
    shown = where(gated=False)
    assert not PREFLIGHT.needs_more(seen({"ceilings": SLOW}, shown, ran=False), shown)


def test_two_nodes_have_one_link_and_no_such_row() -> None:
    assert "preflight.slow_node" not in PREFLIGHT.check_ids(where(2))
    assert not any(launch.conditional for launch in PREFLIGHT.plan(where(2)))


@pytest.mark.parametrize(
    ("slow", "named"),
    [
        (("pair_1_3",), "slow: n2 ("),
        (("pair_1_4",), "slow: n3 ("),
        (("pair_1_2", "pair_1_3", "pair_1_4"), "slow: n0 ("),
    ],
)
def test_the_slow_node_is_named(slow: tuple[str, ...], named: str) -> None:
    rates = {"ceilings": SLOW} | dict.fromkeys(slow, SLOW)
    # Nodes 2 and 3 are the places 1 and 2, which share the pair without the first node.
    if slow == ("pair_1_3",):
        rates["pair_2_3"] = SLOW
    check = slow_node(rates, where())
    assert said(check) == (Outcome.INVALID, Reason.WRONG_ENVIRONMENT)
    assert check.reason.startswith(named), check.reason
    assert "n0-n1" in check.reason and "the floor is 1" in check.reason
    assert check.remedy.startswith("take the node")


def test_where_all_pairs_are_slow_no_node_is_accused() -> None:
    rates = dict.fromkeys(("ceilings", "pair_1_2", "pair_1_3", "pair_1_4", "pair_2_3"), SLOW)
    check = slow_node(rates, where())
    assert said(check) == (Outcome.INVALID, Reason.WRONG_ENVIRONMENT)
    assert check.reason.startswith("no single node: its switch, or a setting")


def test_where_all_pairs_are_fast_it_is_undecided() -> None:
    check = slow_node({"ceilings": SLOW}, where())
    assert said(check) == (Outcome.INCONCLUSIVE, Reason.UNDECIDED)


def test_nodes_that_are_fast_together_need_no_pairs() -> None:
    context = where()
    check = builder.row("preflight", "slow_node", seen({}, context, ran=False), context)
    assert check.outcome is Outcome.PASS


def test_pairs_that_are_missing_are_no_pass() -> None:
    context = where()
    short = seen({"ceilings": SLOW}, context, ran=False)
    check = builder.row("preflight", "slow_node", short, context)
    assert check.outcome is Outcome.INCOMPLETE and "pair_1_2" in check.reason
