"""v2 parity: only tests that ran and passed pass, and speed is told by its slowest shape."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from runbook.records import Check, LaunchStatus, Outcome, Reason
from runbook.records.evidence import JUnitCase, JUnitReport, PhaseEvidence
from tests.phases import builder, heartbeats, spoil, traces
from tests.phases.answers import (
    CRASHED,
    FINE,
    IMPOSSIBLE,
    MACHINE,
    NOT_GATED,
    NOTHING,
    OTHERWISE,
    TOO_LITTLE,
    UNDECIDED,
    UNLIKE,
    WHERE,
    row,
    said,
    says,
)

BROKEN = (Outcome.FAIL, Reason.TEST_FAILED)
NONE = (Outcome.INCOMPLETE, Reason.NOTHING_COLLECTED)
NEEDS_CUDA = (Outcome.SKIPPED, Reason.NEEDS_CUDA)
PATTERN = "test_equivalence_various_patterns"


def with_status(status: str, message: str = "", *, only: str = "") -> spoil.Change:
    return spoil.cases(
        lambda case: replace(case, status=status, message=message) if only in case.name else case
    )


def report(*names: str, device: str = "cuda", bounds: tuple[float, ...] = ()) -> spoil.Change:
    """These tests passed; one with a lower bound of the ratio fails at 1 or less."""
    told = [{"device": device} for _ in names]
    for properties, bound in zip(told, bounds, strict=False):
        properties["v1_over_v2_ratio_lower_99"] = str(bound)
    cases = tuple(
        JUnitCase(
            name=name,
            classname="nsa.tests.x",
            status="failed" if index < len(bounds) and bounds[index] <= 1.0 else "passed",
            properties=told[index],
        )
        for index, name in enumerate(names)
    )
    return spoil.parts(junit=JUnitReport(path="junit.xml", sha256=heartbeats.SHA, cases=cases))


def raced(device: str, *bounds: float) -> spoil.Change:
    names = [f"test_v2_performance_improvement[{number}]" for number in range(len(bounds))]
    return report(*names, device=device, bounds=bounds)


def on_device(device: str) -> spoil.Change:
    """The tests tell this device; the launches that are none tell nothing."""
    named = spoil.cases(lambda case: replace(case, properties={"device": device} if device else {}))
    return lambda made: named(made) if made.launch.kind == "pytest" else made


@pytest.mark.parametrize("what", ["parity", "gaps", "faster"])
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (None, FINE),
        (with_status("failed", "indices differ"), BROKEN),
        (with_status("error", "no fixture"), BROKEN),
        (with_status("skipped", "needs CUDA"), NEEDS_CUDA),
        (report(), NONE),
        (report("test_something_else"), NONE),
        (spoil.parts(junit=None), NOTHING),
        # One that could not begin failed, wherever it was.
        (spoil.both(on_device(""), with_status("error", "ImportError")), BROKEN),
    ],
)
def test_only_tests_that_ran_and_passed_pass(
    what: str, change: spoil.Change | None, expected: tuple[Outcome, Reason]
) -> None:
    assert said(row("v2_parity", what, change)) == expected


@pytest.mark.parametrize("count", [1, 2])
def test_the_row_says_how_many_tests_passed(count: int) -> None:
    passed = report(*(f"{PATTERN}[gaps-{n}]" for n in range(count)))
    said = row("v2_parity", "gaps", passed).reason
    assert said.startswith(f"{count} test{'s' * (count > 1)} of")


@pytest.mark.parametrize("what", ["gaps", "parity"])
def test_the_pattern_gaps_has_its_own_row(what: str) -> None:
    broken = with_status("failed", "blocks 3 and 9", only="gaps")
    says(row("v2_parity", what, broken), BROKEN, "blocks 3 and 9", remedy="NSA_SEL_RANGES_V2=0")
    others = report(f"{PATTERN}[random]")
    assert said(row("v2_parity", what, others)) == (NONE if what == "gaps" else FINE)


@pytest.mark.parametrize("status", [LaunchStatus.TIMED_OUT, LaunchStatus.CRASHED])
def test_a_whole_report_of_a_test_run_that_had_to_be_ended_is_no_pass(status: LaunchStatus) -> None:
    check = row("v2_parity", "parity", spoil.ended(status))
    assert check.outcome is Outcome.INCOMPLETE and "made up" in check.reason


@pytest.mark.parametrize(
    ("change", "where", "wanted", "slowest"),
    [
        (raced("cuda:0", 5.0, 1.7, 9.0), "a100x2_pcie4", FINE, 1.7),
        (raced("cuda:0", 5.0, 0.9), "a100x2_pcie4", BROKEN, 0.9),
        # On a shared CPU it is shown and not gated, and says nothing about a GPU.
        (with_status("failed", "ratio 0.9"), "cpu", NOT_GATED, None),
        (raced("cpu", 5.0, 9.0), "a100x2_pcie4", MACHINE, None),
        (raced("cpu", 5.0, 0.9), "a100x2_pcie4", MACHINE, None),
    ],
)
def test_times_of_the_cpu_say_nothing_about_a_gpu(
    change: spoil.Change, where: str, wanted: Any, slowest: float | None
) -> None:
    """The slowest shape is the number that speed is judged by."""
    check = says(row("v2_parity", "faster", change, builder.context(where)), wanted)
    if slowest is not None:
        assert check.measurement.value == slowest
        assert (check.comparator.value, check.limit) == (">", 1.0)


TESTED = [
    *(("v2_parity", what) for what in ("parity", "gaps")),
    *(("preflight", what) for what in ("equivalence", "group_consistency", "whole_model")),
    *(("preflight", what) for what in ("documents", "safeguards")),
]


@pytest.mark.parametrize("profile", ["cpu", "h100x1"])
@pytest.mark.parametrize(("phase", "what"), TESTED)
def test_tests_tell_of_the_device_that_they_ran_on(phase: str, what: str, profile: str) -> None:
    """Those that fell back to the CPU say nothing about a GPU; those that name none, nothing."""
    where = builder.context(profile)
    fell_back = row(phase, what, on_device("cpu"), where)
    if where.profile.has_gpu:
        says(fell_back, MACHINE, "not on the GPU", remedy="preflight.cuda")
    else:
        says(fell_back, FINE)
    check = says(row(phase, what, on_device(""), where), IMPOSSIBLE, remedy="nsa.tests.told")
    assert check.follows == ""


# Single GPU: scaling against the baseline, and what makes the two not comparable.

PHASES = builder.PHASES


def scaled(
    one: float,
    many: float,
    *,
    what: str = "scaling",
    where: Any = WHERE,
    change: spoil.Change | None = None,
) -> Check:
    """A row where E = many / (2 * one) at one batch per GPU, with one percent between launches.

    At one global batch, which one GPU runs twice as fast, E is half as large.
    """
    planned, plan = PHASES["baseline"].plan(where), PHASES["single_gpu"].plan(where)
    wobble = (0.995, 1.0, 1.005, 0.995, 1.005)[: len(planned)]
    before = {
        launch.name: traces.healthy(launch, where.profile, rate=many * factor)
        for launch, factor in zip(planned, wobble, strict=True)
    }
    alone = {}
    for number, launch in enumerate(plan):
        share = "share" in launch.name or not any("share" in other.name for other in plan)
        rate = one * wobble[number * len(wobble) // len(plan)] * (1 if share else 2)
        made = traces.healthy(launch, builder.batch_of(launch, where.profile), rate=rate)
        alone[launch.name] = change(made) if change else made
    earlier = {"baseline": PhaseEvidence(launches=before)}
    found = PhaseEvidence(launches=alone, earlier=earlier)
    return builder.row("single_gpu", what, found, where)


def only_shares(change: spoil.Change) -> spoil.Change:
    return spoil.of_launch("share", change)


TWO = builder.on_nodes(2)
MEASURED = "; measured: one rank on 1 node and 2 ranks on 2"
CHECKPOINTING = spoil.effective(gradient_checkpointing=True)
CRASHES = only_shares(spoil.ended(LaunchStatus.CRASHED, rows=9))
SMALLER = only_shares(spoil.effective(global_batch=2))
NEEDS_GPUS = (Outcome.SKIPPED, Reason.NEEDS_GPUS)


@pytest.mark.parametrize(("what", "many", "where", "change", "expected", "words"), [
    ("scaling", 1.2e5, WHERE, None, TOO_LITTLE, ""),
    ("scaling", 1.81e5, WHERE, None, UNDECIDED, ""),
    ("scaling", 1.96e5, WHERE, CHECKPOINTING, UNLIKE, "gradient_checkpointing"),
    # Launches with a share of the batch are judged too.
    ("completed", 1.96e5, WHERE, CRASHES, CRASHED, ""),
    ("as_planned", 1.96e5, WHERE, SMALLER, OTHERWISE, ""),
    ("scaling", 1.96e5, WHERE, SMALLER, OTHERWISE, ""),
    ("scaling", 1.96e5, WHERE, only_shares(CHECKPOINTING), UNLIKE, ""),
    # One rank scales to nothing, and a CPU is not gated.
    ("scaling", 1e5, builder.context("h200x1"), None, NEEDS_GPUS, ""),
    ("scaling", 0.8e5, builder.context("cpu"), None, NOT_GATED, ""),
    # Over several nodes it says on how many.
    ("scaling", 1.96e5, TWO, None, FINE, MEASURED),
    ("as_planned", 1.96e5, TWO, None, FINE, ""),
    ("as_planned", 1.96e5, TWO, only_shares(spoil.env(nodes=2)), OTHERWISE,
     "nodes: wanted 1, got 2"),
])  # fmt: skip
def test_scaling_of_unlike_runs_is_not_comparable(
    what: str, many: float, where: Any, change: Any, expected: Any, words: str
) -> None:
    says(scaled(1e5, many, what=what, where=where, change=change), expected, words)


@pytest.mark.parametrize(
    ("one", "many", "what", "expected", "share"),
    [
        # A host that limits a small batch is no bad scaling: two GPUs do twice the work of one,
        # and no more than one with all of the batch.
        (1e5, 1.96e5, "scaling", FINE, 0.98),
        (1e5, 1.96e5, "scaling_global_batch", NOT_GATED, 0.49),
        # Report v4's 847 on two against 334 on one: not possible.
        (334.0, 847.0, "scaling", IMPOSSIBLE, 847 / 334 / 2),
    ],
)
def test_a_host_that_limits_a_small_batch_is_no_bad_scaling(
    one: float, many: float, what: str, expected: Any, share: float
) -> None:
    check = says(scaled(one, many, what=what), expected)
    assert check.measurement.value == pytest.approx(share, rel=1e-3)
    assert check.measurement.path == "baseline/run1/training.csv"


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
