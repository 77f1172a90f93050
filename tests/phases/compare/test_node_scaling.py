"""Scaling over 1, 2, 4, ... nodes: what is launched, and what the throughputs say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from phases.compare import node_scaling
from phases.compare.node_scaling import node_scaling_rows
from phases.kit.case import Case
from phases.kit.finding import Finding
from phases.kit.rows import answered
from runbook.config import registry
from runbook.config.phase import Judgement, PlanContext
from runbook.config.setup import RunOptions
from runbook.engine.plan.prepare import prepare
from runbook.records import LaunchStatus, Outcome
from runbook.records.evidence import LaunchEvidence, PhaseEvidence
from runbook.records.run import Invocation
from runbook.stats import plans
from tests.phases import builder, spoil, traces
from tests.phases.answers import (
    FINE,
    IMPOSSIBLE,
    NOT_GATED,
    OTHERWISE,
    TOO_LITTLE,
    UNDECIDED,
    UNLIKE,
    get,
    says,
)

PHASE = registry.phases()["single_gpu"]
ROW = "single_gpu.node_scaling"
ONE_RANK = 1e4
# Tokens per second of one node with two ranks; the slight waste inside a node is its own.
ONE_NODE = 1.96e4
WOBBLE = (0.995, 1.0, 1.005)


def where(nodes: int, each: int = 1, profile: str = "a100x2_pcie4") -> PlanContext:
    """A run on so many nodes with so many ranks each, one sequence for each rank."""
    known = builder.context(profile).profile
    ranks = nodes * each
    three = {name: one.model_copy(update={"launches": 3}) for name, one in known.phases.items()}
    changes = {
        "ranks": ranks,
        "workload": known.workload.model_copy(update={"global_batch": ranks}),
        "phases": three,
    }
    return PlanContext(
        profile=known.model_copy(update=changes),
        nodes=nodes,
        invocation=Invocation(profile=profile, launcher="slurm", nodes=nodes),
    )


def seen(
    context: PlanContext,
    efficiency: Mapping[int, float],
    *,
    change: Mapping[str, spoil.Change] | None = None,
    but: tuple[str, ...] = (),
) -> PhaseEvidence:
    """A run in which n nodes reach `efficiency[n]` of n times one node, and `change` by name."""
    each = context.profile.ranks // context.nodes

    def one(launch: Any, rate: float, number: int) -> LaunchEvidence:
        profile = builder.batch_of(launch, context.profile)
        made = traces.healthy(launch, profile, rate=rate * WOBBLE[number])
        return (change or {}).get(launch.id, lambda same: same)(made)

    def rate_of(launch: Any) -> float:
        if launch.name.startswith("run"):
            return 2 * ONE_RANK
        if launch.nproc == 1:
            return ONE_RANK
        return ONE_NODE / 2 * launch.nproc * efficiency.get(launch.nodes, 1.0)

    one_node = ONE_NODE if each > 1 else ONE_RANK
    before = {
        launch.name: one(launch, one_node * context.nodes * efficiency[context.nodes], number)
        for number, launch in enumerate(builder.PHASES["baseline"].plan(context))
    }
    alone = {}
    for launch in PHASE.plan(context):
        rate = rate_of(launch) if each > 1 else _of_single(launch, efficiency)
        alone[launch.name] = one(launch, rate, int(launch.name[-1]) - 1)
    for name in but:
        del alone[name]
    return PhaseEvidence(launches=alone, earlier={"baseline": PhaseEvidence(launches=before)})


def _of_single(launch: Any, efficiency: Mapping[int, float]) -> float:
    """On nodes with one rank each."""
    if launch.name.startswith("run"):
        return 2 * ONE_RANK
    return ONE_RANK * launch.nproc * efficiency.get(launch.nodes, 1.0)


def judged(context: PlanContext, found: PhaseEvidence) -> Judgement:
    return builder.judge("single_gpu", found, context)


def answer_of(context: PlanContext, efficiency: Mapping[int, float], **options: Any) -> Finding:
    (row,) = node_scaling_rows(context)
    evidence = seen(context, efficiency, **options)
    return answered(row, Case(phase="single_gpu", evidence=evidence, context=context))


@pytest.mark.parametrize(
    ("nodes", "each", "launched"),
    [
        (1, 1, {}),
        (1, 8, {}),
        (2, 1, {}),
        (2, 8, {1: 8}),
        (3, 1, {2: 2}),
        (4, 1, {2: 2}),
        (4, 2, {1: 2, 2: 4}),
        (6, 1, {2: 2, 4: 4}),
        (8, 8, {1: 8, 2: 16, 4: 32}),
        (9, 1, {2: 2, 4: 4, 8: 8}),
    ],
)
@pytest.mark.parametrize("profile", ["a100x2_pcie4", "cpu"])
def test_powers_of_two_below_the_whole_are_launched_with_all_their_ranks(
    profile: str, nodes: int, each: int, launched: dict[int, int]
) -> None:
    context = where(nodes, each, profile)
    plan = [launch for launch in PHASE.plan(context) if launch.name.startswith("nodes")]
    assert len(plan) == 3 * len(launched)
    assert {launch.nodes: launch.nproc for launch in plan} == launched
    for launch in plan:
        assert launch.argv[0] == "torchrun" and f"--nproc_per_node={each}" in launch.argv
        assert (f"--nnodes={launch.nodes}" in launch.argv) is (launch.nodes > 1)
        # One sequence for each rank, as in the whole.
        assert launch.config_overrides["train.batch_size"] == launch.nproc
    assert (ROW in PHASE.check_ids(context)) is bool(launched)


def test_two_nodes_with_one_rank_each_launch_what_one_machine_with_two_ranks_does() -> None:
    for profile in ("a100x2_pcie4", "cpu"):
        alone = replace(where(2, 1, profile), nodes=1, invocation=None)
        assert PHASE.plan(where(2, 1, profile)) == PHASE.plan(alone)


def test_the_rounds_are_balanced_and_one_rank_is_measured_wherever_nodes_are() -> None:
    names = [launch.name for launch in PHASE.plan(where(4, 1, "cpu"))]
    assert names == [
        *("run1", "share1", "nodes2_1"),
        *("nodes2_2", "share2", "run2"),
        *("run3", "share3", "nodes2_3"),
    ]


def test_healthy_nodes_pass_and_the_table_says_what_each_number_gave() -> None:
    context = where(4, 2)
    judgement = judged(context, seen(context, {2: 0.99, 4: 0.97}))
    check = says(get(judgement, ROW), FINE)
    assert (check.limit, check.limit_source) == (0.9, context.profile.limits["scaling"].source)
    assert check.measurement is not None and check.measurement.value == pytest.approx(0.97)
    assert check.reason.startswith("E against one node: 0.990 of 2 nodes, 0.970 of 4 nodes")
    table = next(one for one in judgement.tables if one.title == "Throughput by number of nodes")
    rows = {(row[0], row[1]): dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert list(rows) == [(1, 2), (2, 4), (4, 8)]
    assert [row["E to one node"] for row in rows.values()] == [None, 0.99, 0.97]
    assert rows[4, 8]["tok/s"] == pytest.approx(4 * ONE_NODE * 0.97, rel=1e-3)
    assert "baseline/run1" in str(rows[4, 8]["launches"])
    assert rows[4, 8]["at least"] < 0.97 < rows[4, 8]["at most"]


@pytest.mark.parametrize(
    ("efficiency", "named"),
    [
        ({2: 0.98, 4: 0.97, 8: 0.60}, "first below 0.9 at 8 nodes"),
        ({2: 0.98, 4: 0.60, 8: 0.55}, "first below 0.9 at 4 nodes"),
        ({2: 0.60, 4: 0.98, 8: 0.98}, "first below 0.9 at 2 nodes"),
    ],
)
def test_the_number_of_nodes_that_falls_short_first_is_named(
    efficiency: dict[int, float], named: str
) -> None:
    says(answer_of(where(8), efficiency), TOO_LITTLE, named)


def test_a_number_near_the_limit_is_undecided_and_more_than_possible_invalid() -> None:
    says(answer_of(where(4), {2: 0.98, 4: 0.905}), UNDECIDED, "undecided from 4 nodes on")
    says(answer_of(where(4), {2: 1.2, 4: 0.98}), IMPOSSIBLE, "not possible at 2 nodes")


def test_where_no_time_decides_it_is_shown_with_the_same_name() -> None:
    check = answer_of(where(8, 1, "cpu"), {2: 0.98, 4: 0.5, 8: 0.4})
    says(check, NOT_GATED, "first below 0.9 at 4 nodes")
    assert check.measurement is not None and check.measurement.value == pytest.approx(0.5)


def test_launches_that_are_missing_leave_it_incomplete() -> None:
    lost = answer_of(where(4), {2: 0.98, 4: 0.97}, but=("nodes2_2",))
    assert lost.outcome is Outcome.INCOMPLETE and "nodes2_2" in lost.reason
    cut = {"single_gpu/nodes2_1": spoil.ended(LaunchStatus.TIMED_OUT)}
    assert answer_of(where(4), {2: 0.98, 4: 0.97}, change=cut).outcome is Outcome.INCOMPLETE
    context = where(4)
    found = replace(seen(context, {2: 0.98, 4: 0.97}), earlier={})
    judgement = judged(context, found)
    check = get(judgement, ROW)
    assert check.outcome is Outcome.INCOMPLETE and "baseline" in check.reason
    # What was measured is shown all the same.
    table = next(one for one in judgement.tables if one.title == "Throughput by number of nodes")
    assert [row[0] for row in table.rows] == [1, 2]


def agents_of(*names: str) -> spoil.Change:
    return lambda made: replace(
        made, devices_before={**(made.devices_before or {}), "nodes": list(names)}
    )


@pytest.mark.parametrize("launch", ["single_gpu/nodes2_3", "single_gpu/share2", "baseline/run1"])
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (spoil.env(nodes=3), "got 3"),
        (spoil.env(nodes=None), "got None"),
        (agents_of("n0", "n1", "n2"), "found 3 (n0, n1, n2)"),
    ],
)
def test_a_launch_on_other_nodes_than_planned_is_invalid_by_either_source(
    launch: str, change: spoil.Change, told: str
) -> None:
    says(answer_of(where(4), {2: 0.98, 4: 0.97}, change={launch: change}), OTHERWISE, launch, told)


def test_it_is_also_told_where_every_launch_says_what_it_ran() -> None:
    context = where(4)
    change = {"single_gpu/nodes2_1": spoil.env(nodes=1)}
    judgement = judged(context, seen(context, {2: 0.98, 4: 0.97}, change=change))
    says(get(judgement, "single_gpu.as_planned"), OTHERWISE, "nodes2_1: nodes: wanted 2, got 1")


def test_launches_of_another_config_are_not_comparable() -> None:
    spoiled = spoil.effective(gradient_checkpointing=True)
    change = {f"single_gpu/nodes2_{number}": spoiled for number in range(1, 4)}
    says(answer_of(where(4), {2: 0.98, 4: 0.97}, change=change), UNLIKE, "gradient_checkpointing")


def test_scaling_of_the_whole_says_where_fewer_nodes_are() -> None:
    for nodes, told in ((4, "1 node and 4 ranks on 4; fewer nodes: node_scaling"), (2, "on 2")):
        context = where(nodes)
        found = seen(context, {2: 0.98, 4: 0.97})
        check = get(judged(context, found), "single_gpu.scaling")
        assert check.reason.endswith(told), check.reason


def test_a_go_needs_it_where_it_needs_scaling() -> None:
    gated = where(4)
    assert PHASE.needed_on_nodes(gated) == (ROW,)
    assert PHASE.needed_on_nodes(where(2)) == ()
    assert PHASE.needed_on_nodes(where(4, 1, "cpu")) == ()
    assert PHASE.needed_on_nodes(builder.context()) == ()


def test_a_row_that_only_shows_is_not_required_of_a_run_on_three_nodes(tmp_path: Any) -> None:
    path = tmp_path / "three.yaml"
    path.write_text("extends: cpu\nname: three\nranks: 3\nworkload: {global_batch: 3}\n")
    asked = RunOptions(phases="all", profile=str(path), launcher="slurm", nodes=3)
    required = prepare(asked).required
    assert "preflight.nodes" in required
    assert not {"preflight.slow_node", ROW} & set(required)


def test_it_follows_the_published_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    real, followed = node_scaling.scaling_over, []

    def recorded(*values: Any, **options: Any) -> Any:
        followed.append(options["plan"])
        return real(*values, **options)

    monkeypatch.setattr(node_scaling, "scaling_over", recorded)
    answer_of(where(4), {2: 0.98, 4: 0.97})
    assert followed == [plans.PLANS["scaling"]]
