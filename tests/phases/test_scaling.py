"""Single GPU: scaling against the baseline, and what makes the two not comparable."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from runbook.records import Check, LaunchStatus
from runbook.records.evidence import PhaseEvidence
from tests.phases import builder, spoil, traces
from tests.phases.answers import WHERE, says

PHASES = builder.PHASES


def scaled(
    one: float, many: float, *, what: str = "scaling", where: Any = WHERE, change: Any = None
) -> Check:
    """A row where E = many / (2 * one) at one batch per GPU, with one percent between launches.

    At one global batch, which one GPU runs twice as fast, E is half as large.
    """
    plan = PHASES["single_gpu"].plan(where)
    wobble = (0.995, 1.0, 1.005, 0.995, 1.005)[: len(PHASES["baseline"].plan(where))]
    earlier = builder.baseline_at(*(many * factor for factor in wobble), where=where)
    alone = {}
    for number, launch in enumerate(plan):
        share = "share" in launch.name or not any("share" in other.name for other in plan)
        rate = one * wobble[number * len(wobble) // len(plan)] * (1 if share else 2)
        made = traces.healthy(launch, builder.batch_of(launch, where.profile), rate=rate)
        alone[launch.name] = change(made) if change else made
    found = PhaseEvidence(launches=alone, earlier=earlier)
    return builder.row("single_gpu", what, found, where)


def only_shares(change: spoil.Change) -> spoil.Change:
    return spoil.of_launch("share", change)


TWO = builder.on_nodes(2)
MEASURED = "; measured: one rank on 1 node and 2 ranks on 2"
CHECKPOINTING = spoil.at("env.effective", gradient_checkpointing=True)
CRASHES = only_shares(spoil.ended(LaunchStatus.CRASHED, rows=9))
SMALLER = only_shares(spoil.at("env.effective", global_batch=2))


@pytest.mark.parametrize(("what", "many", "where", "change", "expected", "words"), [
    ("scaling", 1.2e5, WHERE, None, "FAIL below_limit", ""),
    ("scaling", 1.81e5, WHERE, None, "INCONCLUSIVE undecided", ""),
    ("scaling", 1.96e5, WHERE, CHECKPOINTING, "INVALID not_comparable", "gradient_checkpointing"),
    # Launches with a share of the batch are judged too.
    ("completed", 1.96e5, WHERE, CRASHES, "FAIL crash", ""),
    ("as_planned", 1.96e5, WHERE, SMALLER, "INVALID mismatch", ""),
    ("scaling", 1.96e5, WHERE, SMALLER, "INVALID mismatch", ""),
    ("scaling", 1.96e5, WHERE, only_shares(CHECKPOINTING), "INVALID not_comparable", ""),
    # One rank scales to nothing, and a CPU is not gated.
    ("scaling", 1e5, builder.context("h200x1"), None, "SKIPPED needs_gpus", ""),
    ("scaling", 0.8e5, builder.context("cpu"), None, "SKIPPED not_gated", ""),
    # Over several nodes it says on how many.
    ("scaling", 1.96e5, TWO, None, "PASS ok", MEASURED),
    ("as_planned", 1.96e5, TWO, None, "PASS ok", ""),
    ("as_planned", 1.96e5, TWO, only_shares(spoil.at("env", nodes=2)), "INVALID mismatch",
     "nodes: wanted 1, got 2"),
])  # fmt: skip
def test_scaling_of_unlike_runs_is_not_comparable(
    what: str, many: float, where: Any, change: Any, expected: Any, words: str
) -> None:
    says(scaled(1e5, many, what=what, where=where, change=change), expected, words)


@pytest.mark.parametrize(("one", "many", "what", "expected", "share"), [
    # A host that limits a small batch is no bad scaling: two GPUs do twice the work of one, and no
    # more than one with all of the batch.
    (1e5, 1.96e5, "scaling", "PASS ok", 0.98),
    (1e5, 1.96e5, "scaling_global_batch", "SKIPPED not_gated", 0.49),
    # Report v4's 847 on two against 334 on one: not possible.
    (334.0, 847.0, "scaling", "INVALID not_plausible", 847 / 334 / 2),
])  # fmt: skip
def test_a_host_that_limits_a_small_batch_is_no_bad_scaling(
    one: float, many: float, what: str, expected: Any, share: float
) -> None:
    check = says(scaled(one, many, what=what), expected)
    assert check.measurement.value == pytest.approx(share, rel=1e-3)
    assert check.measurement.path == "baseline/run1/training.csv"


def test_each_gpu_has_the_same_batch_on_both_sides() -> None:
    plan = PHASES["single_gpu"].plan(WHERE)
    order = "run1 share1 share2 run2 run3 share3 share4 run4 run5 share5"
    assert " ".join(launch.name for launch in plan) == order
    for launch in plan:
        batch = 1 if "share" in launch.name else None
        assert launch.config_overrides.get("train.batch_size") == batch
    again = builder.context(config_overrides={"train.batch_size": 8})
    assert PHASES["single_gpu"].plan(again)[1].config_overrides["train.batch_size"] == 4
    for name in ("h200x1", "cpu"):
        plan = PHASES["single_gpu"].plan(builder.context(name))
        assert not [launch.name for launch in plan if "share" in launch.name]


def test_a_launch_of_one_gpu_trains_the_config_of_one_and_every_other_that_of_several() -> None:
    where = builder.context("a100x2_pcie4")
    profile = where.profile.model_copy(update={"config_single": "m7c_125m_1gpu.yaml"})
    for phase in ("baseline", "long_run", "single_gpu"):
        for launch in PHASES[phase].plan(replace(where, profile=profile)):
            single = launch.argv[0] != "torchrun"
            named = profile.config_single if single else profile.config
            assert launch.config == f"configs/{named}", launch.id
