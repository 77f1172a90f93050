"""What a row says of a launch that was not run, was refused, or left nothing to read."""

from __future__ import annotations

import pytest

from phases.kit.case import Case, once
from phases.kit.finding import Finding, in_a_row
from runbook.records import LaunchStatus, Outcome, Reason
from tests.phases import builder, spoil
from tests.phases.answers import MACHINE


def why_not(second: spoil.Change) -> Finding:
    """What a row answers that asks for run2; run1 was refused by the machine."""
    where = builder.context()
    found = builder.evidence(
        "baseline",
        where,
        change=spoil.ended(LaunchStatus.ENVIRONMENT_ERROR, cause="no CUDA device 0"),
        only=("run1",),
    )
    launches = dict(found.launches)
    launches["run2"] = second(launches["run2"])
    evidence = builder.PhaseEvidence(launches=launches, facts={}, earlier={})
    with pytest.raises(Finding) as stopped:
        Case(phase="baseline", evidence=evidence, context=where).launch("run2")
    return stopped.value


def test_a_launch_not_run_for_a_refused_one_has_its_cause() -> None:
    refused = spoil.ended(LaunchStatus.NOT_RUN, cause="run1 was refused: no CUDA device 0")
    found = why_not(refused)
    assert (found.outcome, found.code) == MACHINE and "no CUDA device 0" in found.reason


def test_a_launch_not_run_for_another_reason_has_its_own() -> None:
    found = why_not(spoil.ended(LaunchStatus.NOT_RUN, cause="the run was interrupted"))
    assert (found.outcome, found.code) == (Outcome.INCOMPLETE, Reason.NOT_RUN)
    assert found.reason == "not run: the run was interrupted"


def test_an_answer_about_a_launch_is_worked_out_once_in_a_case() -> None:
    worked_out = []

    @once
    def answer(case: Case, name: str) -> int:
        worked_out.append((case, name))
        return len(worked_out)

    where = builder.context()
    evidence = builder.evidence("single_gpu", where)
    one, other = (Case(phase="single_gpu", evidence=evidence, context=where) for _ in range(2))
    assert [answer(one, "run1"), answer(one, "run2"), answer(one, "run1")] == [1, 2, 1]
    assert answer(other, "run1") == 3, "another case may have another profile"
    assert worked_out == [(one, "run1"), (one, "run2"), (other, "run1")]


def test_problems_of_a_thousand_ranks_are_a_line_and_not_a_book() -> None:
    assert in_a_row(["a", "b"]) == "a; b"
    said = in_a_row([f"rank {number} is odd" for number in range(1024)])
    assert said.startswith("rank 0 is odd; rank 1 is odd") and said.endswith("; and 1004 more")
