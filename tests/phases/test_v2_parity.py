"""v2 parity: only tests that ran and passed pass, and speed is told by its slowest shape."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from runbook.records import LaunchStatus, Outcome, Reason
from runbook.records.evidence import JUnitCase, JUnitReport
from tests.phases import builder, heartbeats, spoil
from tests.phases.answers import FINE, IMPOSSIBLE, MACHINE, NOT_GATED, NOTHING, row, said, says

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
    check = says(row(phase, what, on_device(""), where), IMPOSSIBLE, remedy="told_device")
    assert check.follows == ""
