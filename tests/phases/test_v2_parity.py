"""v2 parity: only tests that ran and passed pass, and speed is told by its slowest shape."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runbook.records import LaunchStatus, Outcome, Reason
from runbook.records.evidence import JUnitCase, JUnitReport, LaunchEvidence
from tests.phases import builder, heartbeats, spoil
from tests.phases.answers import IMPOSSIBLE, MACHINE, NOT_GATED, NOTHING, row, said, says


def with_status(status: str, message: str = "", *, only: str = "") -> spoil.Change:
    return spoil.cases(
        lambda case: replace(case, status=status, message=message) if only in case.name else case
    )


def collected(*names: str) -> spoil.Change:
    on_gpu = {"device": "cuda"}
    cases = tuple(
        JUnitCase(name=name, classname="nsa.tests.x", status="passed", properties=on_gpu)
        for name in names
    )
    report = JUnitReport(path="v2_parity/parity/junit.xml", sha256=heartbeats.SHA, cases=cases)
    return spoil.parts(junit=report)


@pytest.mark.parametrize("what", ["parity", "gaps", "faster"])
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (None, (Outcome.PASS, Reason.OK)),
        (with_status("failed", "indices differ"), (Outcome.FAIL, Reason.TEST_FAILED)),
        (with_status("error", "no fixture"), (Outcome.FAIL, Reason.TEST_FAILED)),
        (with_status("skipped", "needs CUDA"), (Outcome.SKIPPED, Reason.NEEDS_CUDA)),
        (collected(), (Outcome.INCOMPLETE, Reason.NOTHING_COLLECTED)),
        (collected("test_something_else"), (Outcome.INCOMPLETE, Reason.NOTHING_COLLECTED)),
        (spoil.parts(junit=None), NOTHING),
    ],
)
def test_only_tests_that_ran_and_passed_pass(
    what: str, change: spoil.Change | None, expected: tuple[Outcome, Reason]
) -> None:
    assert said(row("v2_parity", what, change)) == expected


def test_the_row_says_how_many_tests_passed() -> None:
    gaps = [f"test_equivalence_various_patterns[gaps-{n}]" for n in (1, 2)]
    assert row("v2_parity", "gaps", collected(*gaps[:1])).reason.startswith("1 test of")
    assert row("v2_parity", "gaps", collected(*gaps)).reason.startswith("2 tests of")


def test_the_pattern_gaps_has_its_own_row() -> None:
    broken = with_status("failed", "blocks 3 and 9", only="gaps")
    for what in ("gaps", "parity"):
        check = row("v2_parity", what, broken)
        assert check.outcome is Outcome.FAIL and "blocks 3 and 9" in check.reason
        assert "NSA_SEL_RANGES_V2=0" in check.remedy
    only_others = collected("test_equivalence_various_patterns[random]")
    assert row("v2_parity", "gaps", only_others).code is Reason.NOTHING_COLLECTED


def test_a_slow_v2_on_a_shared_cpu_is_shown_and_not_gated() -> None:
    slower = with_status("failed", "ratio 0.9")
    says(row("v2_parity", "faster", slower, builder.context("cpu")), NOT_GATED)


@pytest.mark.parametrize("status", [LaunchStatus.TIMED_OUT, LaunchStatus.CRASHED])
def test_a_whole_report_of_a_test_run_that_had_to_be_ended_is_no_pass(status: LaunchStatus) -> None:
    check = row("v2_parity", "parity", spoil.ended(status))
    assert check.outcome is Outcome.INCOMPLETE and "made up" in check.reason


def raced(device: str, *bounds: float) -> spoil.Change:
    """Speed tests that recorded these lower bounds; the test itself fails at 1 or less."""
    cases = tuple(
        JUnitCase(
            name=f"test_v2_performance_improvement[{number}]",
            classname="nsa.tests.test_performance_guards",
            status="passed" if bound > 1.0 else "failed",
            properties={"v1_over_v2_ratio_lower_99": str(bound), "device": device},
        )
        for number, bound in enumerate(bounds)
    )
    return spoil.parts(
        junit=JUnitReport(path="speed/junit.xml", sha256=heartbeats.SHA, cases=cases)
    )


def test_the_slowest_shape_is_the_number_that_speed_is_judged_by() -> None:
    check = row("v2_parity", "faster", raced("cuda:0", 5.0, 1.7, 9.0))
    assert check.measurement is not None and check.measurement.value == 1.7
    assert (check.outcome, check.comparator.value, check.limit) == (Outcome.PASS, ">", 1.0)
    slow = row("v2_parity", "faster", raced("cuda:0", 5.0, 0.9))
    assert slow.outcome is Outcome.FAIL and slow.measurement is not None
    assert slow.measurement.value == 0.9


def test_times_of_the_cpu_say_nothing_about_a_gpu() -> None:
    for bounds in ((5.0, 9.0), (5.0, 0.9)):
        says(row("v2_parity", "faster", raced("cpu", *bounds)), MACHINE)


def on_device(device: str) -> spoil.Change:
    """The tests tell this device; the launches that are none tell nothing."""
    named = spoil.cases(lambda case: replace(case, properties={"device": device} if device else {}))
    return lambda made: named(made) if made.launch.kind == "pytest" else made


TESTED = [
    ("v2_parity", "parity"),
    ("v2_parity", "gaps"),
    ("preflight", "equivalence"),
    ("preflight", "group_consistency"),
    ("preflight", "whole_model"),
    ("preflight", "documents"),
    ("preflight", "safeguards"),
]


@pytest.mark.parametrize(("phase", "what"), TESTED)
def test_tests_that_fell_back_to_the_cpu_say_nothing_about_a_gpu(phase: str, what: str) -> None:
    says(row(phase, what, on_device("cpu")), MACHINE, "not on the GPU", remedy="preflight.cuda")
    assert row(phase, what, on_device("cpu"), builder.context("cpu")).outcome is Outcome.PASS


@pytest.mark.parametrize("profile", ["cpu", "h100x1"])
@pytest.mark.parametrize(("phase", "what"), TESTED)
def test_a_test_that_names_no_device_proves_nothing_on_any_machine(
    phase: str, what: str, profile: str
) -> None:
    check = row(phase, what, on_device(""), builder.context(profile))
    says(check, IMPOSSIBLE, remedy="told_device")
    assert check.follows == ""


def test_a_test_that_could_not_begin_failed_wherever_it_was() -> None:
    def broken(made: LaunchEvidence) -> LaunchEvidence:
        return with_status("error", "ImportError")(on_device("")(made))

    assert said(row("v2_parity", "parity", broken)) == (Outcome.FAIL, Reason.TEST_FAILED)
