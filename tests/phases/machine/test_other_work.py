"""Other work on the machine is a warning of a timed launch, and never more than that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from runbook.records import Check, LaunchResult, LaunchStatus, Outcome, Reason
from tests.phases import answers, builder, machine_files
from tests.phases.answers import WARNED, says


def row(**changed: Any) -> Check:
    """The row of a healthy baseline of which one launch is changed."""
    where = builder.context("cpu")
    return answers.row(
        "baseline", "other_work", lambda made: replace(made, **changed), where, only=["run1"]
    )


def test_a_quiet_machine_passes_with_the_share() -> None:
    found = row()
    assert (found.outcome, found.code, found.required) == (Outcome.PASS, Reason.OK, False)
    assert found.measurement is not None and found.measurement.value == pytest.approx(
        1 / 120, abs=1e-4
    )
    assert "load average up to 2.1" in found.reason


@pytest.mark.parametrize("load", [{"others_s": 25.0}, {"others_s": 13.0, "steal_s": 12.0}])
def test_more_than_a_fifth_of_the_cpus_is_a_warning(load: dict[str, float]) -> None:
    found = says(row(load=machine_files.load(**load)), WARNED, "of 2 CPUs")
    assert found.remedy.startswith("end the other work")
    assert found.evidence == ("baseline/run1/load.json",)


def test_a_fifth_is_none_yet() -> None:
    assert row(load=machine_files.load(others_s=24.0)).code is Reason.OK


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"load": None}, "not recorded"),
        ({"load": {"problem": "the kernel tells no times"}}, "the kernel tells no times"),
        ({"load": {**machine_files.load(), "others_s": None}}, "not recorded"),
        ({"load": {**machine_files.load(), "total_s": 0.0}}, "not recorded"),
        (
            {
                "result": LaunchResult(status=LaunchStatus.HUNG),
                "load": machine_files.load(others_s=90.0),
            },
            "did not finish",
        ),
    ],
)
def test_where_nothing_can_be_told_nothing_is(changed: dict[str, Any], words: str) -> None:
    found = row(**changed)
    assert found.outcome is Outcome.SKIPPED and words in found.reason
