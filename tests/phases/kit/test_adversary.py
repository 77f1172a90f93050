"""Evidence that somebody edited by a row or two, consistently or not, is never a GO."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from runbook.records import Check, Outcome
from runbook.records.evidence import LaunchEvidence
from tests.phases import answers, builder, heartbeats, spoil


def _one_loss(value: float) -> spoil.Change:
    """One row of the CSV, and the heartbeats of every rank with it."""

    def changed(table: Any) -> Any:
        kept = table["loss"].copy()
        kept.iloc[len(kept) // 2] = value
        return kept

    return spoil.columns(loss=changed)


def _only_in_the_csv(change: spoil.Change) -> spoil.Change:
    """The heartbeats keep what they said."""

    def alone(made: LaunchEvidence) -> LaunchEvidence:
        return replace(change(made), ranks=tuple(replace(log) for log in made.ranks))

    return alone


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


def _silent(made: LaunchEvidence) -> LaunchEvidence:
    """Rank 1 says nothing in the middle half of the run, and ends with the others."""
    steps = made.ranks[1].steps
    quarter = len(steps) // 4
    heard = (steps["step"] <= quarter) | (steps["step"] > 3 * quarter)
    return spoil.rank(1, steps=steps[heard].reset_index(drop=True))(made)


def _copied(made: LaunchEvidence) -> LaunchEvidence:
    return replace(made, training=replace(made.training, sha256=heartbeats.SHA))


def _copied_heartbeats(made: LaunchEvidence) -> LaunchEvidence:
    return spoil.rank(0, sha256=heartbeats.SHA)(made)


EDITS: dict[str, tuple[str, spoil.Change, str, str]] = {
    "a loss of 1e308": ("long_run", _one_loss(1e308), "plausible", "which no cross-entropy can"),
    "a step that is another one": ("baseline", _other_step, "plausible", "row 20 is step 21"),
    "that, in the CSV alone": ("baseline", _only_in_the_csv(_other_step), "accounts", "of step"),
    "one reading of the gates": ("long_run", _one_reading, "gates", "1 reading(s) of the gates"),
    "no reading in the middle": ("long_run", _no_reading_in_the_middle, "gates", "no reading of"),
    "rank 1 silent": ("long_run", _silent, "accounts", "rank 1 ended"),
    "one file in all launches": ("baseline", _copied, "comparable", "are the same file"),
    "one heartbeat file": ("baseline", _copied_heartbeats, "comparable", "are the same file"),
}


def _row(phase: str, what: str, change: spoil.Change | None, profile: str) -> Check:
    where = builder.context(profile)
    return answers.row(phase, what, change, where)


@pytest.mark.parametrize("profile", ["a100x2_pcie4", "cpu"])
@pytest.mark.parametrize("name", EDITS)
def test_an_edit_makes_a_required_row_no_pass(name: str, profile: str) -> None:
    phase, change, what, text = EDITS[name]
    assert _row(phase, what, None, profile).outcome is Outcome.PASS
    check = _row(phase, what, change, profile)
    assert check.required
    assert check.outcome is not Outcome.PASS
    assert text in check.reason
