"""Single GPU: scaling against the baseline, and what makes the two not comparable."""

from __future__ import annotations

from typing import Any

import pytest

from runbook.config import registry
from runbook.records import Check, LaunchStatus, Outcome, Reason
from runbook.records.evidence import PhaseEvidence
from tests.phases import builder, spoil, traces
from tests.phases.answers import CRASHED, NOT_GATED, OTHERWISE, UNLIKE, WHERE, said, says

PHASES = registry.phases()


def scaled_evidence(
    one: float, many: float, *, where: Any = WHERE, change: spoil.Change | None = None
) -> PhaseEvidence:
    """E = many / (2 * one) at one batch per GPU, with one percent between launches.

    At one global batch, which one GPU runs twice as fast, E is half as large.
    """
    planned = PHASES["baseline"].plan(where)
    wobble = (0.995, 1.0, 1.005, 0.995, 1.005)[: len(planned)]
    before = {
        launch.name: traces.healthy(launch, where.profile, rate=many * factor)
        for launch, factor in zip(planned, wobble, strict=True)
    }
    alone = {}
    plan = PHASES["single_gpu"].plan(where)
    for number, launch in enumerate(plan):
        share = "share" in launch.name or not any("share" in other.name for other in plan)
        rate = one * wobble[number * len(wobble) // len(plan)] * (1 if share else 2)
        made = traces.healthy(launch, builder.batch_of(launch, where.profile), rate=rate)
        alone[launch.name] = change(made) if change else made
    earlier = {"baseline": PhaseEvidence(launches=before)}
    return PhaseEvidence(launches=alone, earlier=earlier)


def scaled(
    one: float,
    many: float,
    *,
    what: str = "scaling",
    where: Any = WHERE,
    change: spoil.Change | None = None,
) -> Check:
    """One row of such a run."""
    found = scaled_evidence(one, many, where=where, change=change)
    return builder.row("single_gpu", what, found, where)


@pytest.mark.parametrize(
    ("one", "many", "expected"),
    [
        (1e5, 1.96e5, (Outcome.PASS, Reason.OK)),
        (1e5, 1.2e5, (Outcome.FAIL, Reason.BELOW_LIMIT)),
        (1e5, 1.81e5, (Outcome.INCONCLUSIVE, Reason.UNDECIDED)),
        # Report v4's 847 on two against 334 on one: not possible.
        (334.0, 847.0, (Outcome.INVALID, Reason.NOT_PLAUSIBLE)),
    ],
)
def test_scaling(one: float, many: float, expected: tuple[Outcome, Reason]) -> None:
    check = says(scaled(one, many), expected)
    assert check.measurement.value == pytest.approx(many / one / 2, rel=1e-3)
    assert check.measurement.path == "baseline/run1/training.csv"


def test_scaling_of_unlike_runs_is_not_comparable() -> None:
    check = scaled(1e5, 1.96e5, change=spoil.effective(gradient_checkpointing=True))
    says(check, UNLIKE, "gradient_checkpointing")


def test_each_gpu_has_the_same_batch_on_both_sides() -> None:
    plan = PHASES["single_gpu"].plan(WHERE)
    assert [launch.name for launch in plan] == [
        *("run1", "share1", "share2", "run2", "run3", "share3", "share4", "run4", "run5", "share5")
    ]
    for launch in plan:
        assert launch.config_overrides.get("train.batch_size") == (
            1 if "share" in launch.name else None
        )
    again = builder.context(config_overrides={"train.batch_size": 8})
    assert PHASES["single_gpu"].plan(again)[1].config_overrides["train.batch_size"] == 4
    for name in ("h200x1", "cpu"):
        plan = PHASES["single_gpu"].plan(builder.context(name))
        assert not [launch.name for launch in plan if "share" in launch.name]


def test_a_host_that_limits_a_small_batch_is_no_bad_scaling() -> None:
    """Two GPUs do twice the work of one, and no more than one with all of the batch."""
    assert scaled(1e5, 1.96e5).outcome is Outcome.PASS
    shown = says(scaled(1e5, 1.96e5, what="scaling_global_batch"), NOT_GATED)
    assert shown.measurement is not None
    assert shown.measurement.value == pytest.approx(0.49, rel=1e-3)


def only_shares(change: spoil.Change) -> spoil.Change:
    return lambda made: change(made) if "share" in made.launch.name else made


@pytest.mark.parametrize(
    ("what", "change", "expected"),
    [
        ("completed", spoil.ended(LaunchStatus.CRASHED, rows=9), CRASHED),
        ("as_planned", spoil.effective(global_batch=2), OTHERWISE),
        ("scaling", spoil.effective(global_batch=2), OTHERWISE),
        ("scaling", spoil.effective(gradient_checkpointing=True), UNLIKE),
    ],
)
def test_launches_with_a_share_of_the_batch_are_judged_too(
    what: str, change: spoil.Change, expected: tuple[Outcome, Reason]
) -> None:
    assert scaled(1e5, 1.96e5, what=what).outcome is Outcome.PASS
    assert said(scaled(1e5, 1.96e5, what=what, change=only_shares(change))) == expected


def test_one_rank_scales_to_nothing_and_cpu_is_not_gated() -> None:
    assert said(scaled(1e5, 1e5, where=builder.context("h200x1"))) == (
        Outcome.SKIPPED,
        Reason.NEEDS_GPUS,
    )
    cpu = says(scaled(1e5, 0.8e5, where=builder.context("cpu")), NOT_GATED)
    assert cpu.measurement is not None


def test_over_several_nodes_it_says_on_how_many() -> None:
    check = scaled(1e5, 1.96e5, where=builder.on_nodes(2))
    assert check.reason.endswith("; measured: one rank on 1 node and 2 ranks on 2"), check.reason
    other = scaled(1e5, 1.96e5, what="as_planned", where=builder.on_nodes(2))
    assert other.outcome is Outcome.PASS
    spoiled = only_shares(spoil.env(nodes=2))
    says(scaled(1e5, 1.96e5, what="as_planned", where=builder.on_nodes(2), change=spoiled),
         OTHERWISE, "nodes: wanted 1, got 2")  # fmt: skip
