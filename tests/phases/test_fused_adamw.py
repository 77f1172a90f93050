"""Fused AdamW: kept, dropped or undecided, and whose fault an ended launch is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from runbook.records import LaunchStatus, Outcome, Reason
from runbook.records.evidence import LaunchEvidence
from tests.phases import builder
from tests.phases.answers import WARNED, WHERE, get, judged, said


def test_fused_that_is_not_slower_is_kept() -> None:
    judgement = judged("fused_adamw", {"baseline": 1e5, "fused": 1.05e5})
    keep = get(judgement, "fused_adamw.keep")
    assert said(keep) == (Outcome.PASS, Reason.OK) and keep.reason.startswith("KEEP")
    assert judgement.choices == {"NSA_OPT_FUSED": "1"}


def test_fused_that_is_slower_is_dropped_and_the_phase_passes() -> None:
    judgement = judged("fused_adamw", {"baseline": 1e5, "fused": 0.9e5})
    keep = get(judgement, "fused_adamw.keep")
    assert keep.outcome is Outcome.PASS and keep.reason.startswith("DROP")
    assert judgement.choices == {}


def test_the_table_of_plain_and_fused_has_both_arms() -> None:
    rates = {"baseline": 1e5, "fused": 0.9e5}
    found = builder.evidence("fused_adamw", WHERE, rates=rates)
    (table,) = builder.judge("fused_adamw", found, WHERE).tables
    assert [row[0] for row in table.rows] == ["baseline", "fused"]
    assert [row[1] for row in table.rows] == pytest.approx([1e5, 0.9e5])


def test_fused_near_the_margin_is_inconclusive_and_stays_unset() -> None:
    def rough(made: LaunchEvidence) -> LaunchEvidence:
        assert made.training is not None
        return replace(made, training=builder.jittered(made.training, 0.25))

    rates = {"baseline": 1e5, "fused": 0.98e5}
    found = builder.evidence("fused_adamw", WHERE, rates=rates, change=rough)
    judgement = builder.judge("fused_adamw", found, WHERE)
    assert said(get(judgement, "fused_adamw.keep")) == (Outcome.INCONCLUSIVE, Reason.UNDECIDED)
    assert judgement.choices == {}


@pytest.mark.parametrize("arm", ["baseline", "fused"])
def test_an_a_b_of_identical_code_is_invalid(arm: str) -> None:
    change = builder.without_effect("NSA_OPT_FUSED", arm=arm)
    found = builder.evidence("fused_adamw", WHERE, change=change, rates={"fused": 2e5})
    judgement = builder.judge("fused_adamw", found, WHERE)
    for what in ("took_effect", "keep"):
        assert said(get(judgement, f"fused_adamw.{what}")) == (Outcome.INVALID, Reason.NO_EFFECT)
    assert judgement.choices == {}


def test_an_a_a_of_the_optimizer_must_not_find_a_difference() -> None:
    where = builder.context(aa=True)
    judgement = judged("fused_adamw", {"baseline": 1e5, "again": 0.8e5}, where)
    assert said(get(judgement, "fused_adamw.keep")) == (Outcome.INVALID, Reason.NOT_PLAUSIBLE)
    equal = judged("fused_adamw", {}, where)
    assert get(equal, "fused_adamw.keep").outcome is Outcome.PASS
    assert judgement.choices == equal.choices == {}


def test_fused_that_learns_otherwise_is_dropped() -> None:
    def worse(table: Any) -> Any:
        return table["loss"] + 0.3 * (table["arm"] == "fused")

    found = builder.evidence("fused_adamw", WHERE, change=builder.columns(loss=worse))
    judgement = builder.judge("fused_adamw", found, WHERE)
    assert said(get(judgement, "fused_adamw.loss_parity")) == WARNED
    keep = get(judgement, "fused_adamw.keep")
    assert said(keep) == WARNED and keep.reason.startswith("WARNING: DROP")
    assert judgement.choices == {}


FAULTS = [LaunchStatus.HUNG, LaunchStatus.CRASHED, LaunchStatus.NON_FINITE]


@pytest.mark.parametrize("status", FAULTS)
def test_fused_that_ends_the_launch_is_dropped_and_the_phase_passes(status: LaunchStatus) -> None:
    # 24 rows of the control, then 10 of the fused arm.
    found = builder.evidence("fused_adamw", WHERE, change=builder.ended(status, rows=34))
    judgement = builder.judge("fused_adamw", found, WHERE)
    for what in ("completed", "keep"):
        check = get(judgement, f"fused_adamw.{what}")
        assert (
            said(check) == WARNED and "dropped" in check.reason.lower()
        ) or "DROP" in check.reason
    outcomes = {check.outcome for check in judgement.checks}
    assert outcomes == {Outcome.PASS, Outcome.SKIPPED}
    assert judgement.choices == {}


def test_a_control_that_ends_the_launch_fails_the_phase() -> None:
    found = builder.evidence("fused_adamw", WHERE, change=builder.ended(LaunchStatus.HUNG, rows=10))
    judgement = builder.judge("fused_adamw", found, WHERE)
    assert said(get(judgement, "fused_adamw.completed")) == (Outcome.FAIL, Reason.HANG)
    assert get(judgement, "fused_adamw.keep").outcome is Outcome.INCOMPLETE


def test_what_we_cut_off_ourselves_is_no_fault_of_the_fused_arm() -> None:
    change = builder.ended(LaunchStatus.TIMED_OUT, rows=34)
    found = builder.evidence("fused_adamw", WHERE, change=change)
    judgement = builder.judge("fused_adamw", found, WHERE)
    assert get(judgement, "fused_adamw.completed").outcome is Outcome.INCOMPLETE
    assert get(judgement, "fused_adamw.keep").outcome is Outcome.INCOMPLETE


def test_a_refused_fused_arm_is_dropped_while_the_rest_is_judged() -> None:
    def refused(made: LaunchEvidence) -> LaunchEvidence:
        assert made.training is not None
        failure = ({"arm": "fused", "error": "fused=True needs CUDA"},)
        table = made.training.frame[made.training.frame["arm"] != "fused"].copy()
        table["step"] = range(1, len(table) + 1)
        log = replace(made.training, frame=table)
        spoken = builder.every_rank(arm_failures=failure, last_step=len(table))(made)
        return replace(spoken, training=log)

    found = builder.evidence("fused_adamw", WHERE, change=refused)
    judgement = builder.judge("fused_adamw", found, WHERE)
    assert get(judgement, "fused_adamw.completed").outcome is Outcome.PASS
    assert get(judgement, "fused_adamw.plausible").outcome is Outcome.PASS
    keep = get(judgement, "fused_adamw.keep")
    assert said(keep) == WARNED and "fused=True needs CUDA" in keep.reason


def test_in_launches_of_its_own_a_hanging_fused_arm_is_dropped_too() -> None:
    where = builder.context(protocol="launches")
    hung = builder.ended(LaunchStatus.HUNG, rows=20)
    found = builder.evidence("fused_adamw", where, change=hung, only=["fused_r1"])
    judgement = builder.judge("fused_adamw", found, where)
    assert said(get(judgement, "fused_adamw.completed")) == WARNED
    assert get(judgement, "fused_adamw.keep").reason.startswith("WARNING: DROP")
    control = builder.evidence("fused_adamw", where, change=hung, only=["baseline_r1"])
    assert builder.row("fused_adamw", "completed", control, where).outcome is Outcome.FAIL


def test_on_a_cpu_an_undecided_speed_leaves_the_toggle_unset_and_passes() -> None:
    where = builder.context("cpu")

    def rough(made: LaunchEvidence) -> LaunchEvidence:
        assert made.training is not None
        return replace(made, training=builder.jittered(made.training, 0.3))

    found = builder.evidence("fused_adamw", where, change=rough)
    judgement = builder.judge("fused_adamw", found, where)
    keep = get(judgement, "fused_adamw.keep")
    assert said(keep) == (Outcome.PASS, Reason.OK) and "leave NSA_OPT_FUSED unset" in keep.reason
    assert judgement.choices == {}
