"""What a row says of a launch that was not run, was refused, or left nothing to read."""

from __future__ import annotations

from typing import Any

import pytest

from phases.kit.case import Case, once
from phases.kit.finding import Finding, listed
from runbook.records import LaunchStatus
from tests.phases import builder, spoil
from tests.phases.answers import MACHINE, NOT_RUN, says


@pytest.mark.parametrize(
    ("cause", "wanted", "reason"),
    [
        ("run1 was refused: no CUDA device 0", MACHINE, "no CUDA device 0"),
        ("the run was interrupted", NOT_RUN, "not run: the run was interrupted"),
    ],
)
def test_a_launch_not_run_for_a_refused_one_has_its_cause(
    cause: str, wanted: Any, reason: str
) -> None:
    """run1 was refused by the machine, run2 was not run; for another reason it has its own."""
    refused = spoil.ended(LaunchStatus.ENVIRONMENT_ERROR, cause="no CUDA device 0")
    change = spoil.both(
        spoil.of_launch("run1", refused),
        spoil.of_launch("run2", spoil.ended(LaunchStatus.NOT_RUN, cause=cause)),
    )
    evidence = builder.evidence("baseline", builder.context(), change=change)
    with pytest.raises(Finding) as stopped:
        Case(phase="baseline", evidence=evidence, context=builder.context()).launch("run2")
    says(stopped.value, wanted, reason)


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
    assert listed(["a", "b"]) == "a; b"
    said = listed([f"rank {number} is odd" for number in range(1024)])
    assert said.startswith("rank 0 is odd; rank 1 is odd") and said.endswith("; and 1004 more")
