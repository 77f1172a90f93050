"""Evidence that somebody edited by a row or two, consistently or not, is never a GO."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from runbook.records import Outcome
from runbook.records.evidence import LaunchEvidence
from tests.phases import answers, builder, heartbeats, spoil


def _other_step(made: LaunchEvidence) -> LaunchEvidence:
    """Step 20 missing, and one more at the end: as many rows as were planned."""

    def moved(table: Any) -> Any:
        return table["step"] + (table["step"] >= 20)

    return spoil.columns(step=moved)(made)


def _one_reading(made: LaunchEvidence) -> LaunchEvidence:
    return replace(made, gates=made.gates.iloc[:1])


def _no_reading_in_the_middle(made: LaunchEvidence) -> LaunchEvidence:
    count = len(made.gates)
    keep = [*range(count // 4), *range(3 * count // 4, count)]
    return replace(made, gates=made.gates.iloc[keep])


def _copied(made: LaunchEvidence) -> LaunchEvidence:
    return replace(made, training=replace(made.training, sha256=heartbeats.SHA))


def _copied_heartbeats(made: LaunchEvidence) -> LaunchEvidence:
    return spoil.rank(0, sha256=heartbeats.SHA)(made)


EDITS: dict[str, tuple[str, spoil.Change, str, str]] = {
    "a step that is another one": ("baseline", _other_step, "plausible", "row 20 is step 21"),
    "one reading of the gates": ("long_run", _one_reading, "gates", "1 reading(s) of the gates"),
    "no reading in the middle": ("long_run", _no_reading_in_the_middle, "gates", "no reading of"),
    "one file in all launches": ("baseline", _copied, "comparable", "are the same file"),
    "one heartbeat file": ("baseline", _copied_heartbeats, "comparable", "are the same file"),
}


@pytest.mark.parametrize("profile", ["a100x2_pcie4", "cpu"])
@pytest.mark.parametrize("name", EDITS)
def test_an_edit_makes_a_required_row_no_pass(name: str, profile: str) -> None:
    phase, change, what, text = EDITS[name]
    where = builder.context(profile)
    assert answers.row(phase, what, where=where).outcome is Outcome.PASS
    check = answers.row(phase, what, change, where)
    assert check.required and check.outcome is not Outcome.PASS
    assert text in check.reason
