"""Fused AdamW: kept, dropped or undecided, and whose fault an ended launch is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from runbook.config import registry
from runbook.records import LaunchStatus, Outcome, Reason, Verdict, judge_run
from runbook.records.evidence import LaunchEvidence
from tests.phases import answers, builder, spoil
from tests.phases.answers import (
    FINE,
    IMPOSSIBLE,
    UNDECIDED,
    WARNED,
    WHERE,
    get,
    judged,
    noisy,
    said,
    says,
)


@pytest.mark.parametrize(
    ("fused", "change", "outcome", "word", "chosen"),
    [
        (1.05e5, None, FINE, "KEEP", {"NSA_OPT_FUSED": "1"}),
        (0.9e5, None, FINE, "DROP", {}),
        (0.98e5, spoil.jitter(0.25), UNDECIDED, "", {}),
    ],
)
def test_fused_is_kept_unless_it_is_slower_and_stays_unset_near_the_margin(
    fused: float,
    change: spoil.Change | None,
    outcome: tuple[Outcome, Reason],
    word: str,
    chosen: dict[str, str],
) -> None:
    rates = {"baseline": 1e5, "fused": fused}
    found = builder.evidence("fused_adamw", WHERE, rates=rates, change=change)
    judgement = builder.judge("fused_adamw", found, WHERE)
    keep = says(get(judgement, "fused_adamw.keep"), outcome)
    assert keep.reason.startswith(word)
    assert judgement.choices == chosen
    (table,) = judgement.tables
    assert [row[0] for row in table.rows] == ["baseline", "fused"]
    assert change or [row[1] for row in table.rows] == pytest.approx([1e5, fused])


def test_the_safe_mode_leaves_nothing_to_compare_and_never_a_go() -> None:
    where = replace(WHERE, toggles={"NSA_DDP_SAFE_MODE": "1"})
    judgement = builder.judge("fused_adamw", builder.evidence("fused_adamw", where), where)
    assert {said(check) for check in judgement.checks} == {(Outcome.SKIPPED, Reason.NOT_COMPARABLE)}
    keep = get(judgement, "fused_adamw.keep")
    assert keep.required and "NSA_DDP_SAFE_MODE=1 forbids NSA_OPT_FUSED=1" in keep.reason
    assert judge_run(judgement.checks, [keep.id]) is Verdict.INCOMPLETE


@pytest.mark.parametrize("arm", ["baseline", "fused"])
def test_an_a_b_of_identical_code_is_invalid(arm: str) -> None:
    change = spoil.without_effect("NSA_OPT_FUSED", arm=arm)
    found = builder.evidence("fused_adamw", WHERE, change=change, rates={"fused": 2e5})
    judgement = builder.judge("fused_adamw", found, WHERE)
    for what in ("took_effect", "keep"):
        assert said(get(judgement, f"fused_adamw.{what}")) == (Outcome.INVALID, Reason.NO_EFFECT)
    assert judgement.choices == {}


@pytest.mark.parametrize("other", [0.8e5, 0.953e5, 1.047e5, 1.25e5])
def test_an_a_a_is_judged_alike_in_both_directions(other: float) -> None:
    """A variant that looked 4.7 % faster than itself was KEEP, one 5.5 % slower INVALID."""
    where = builder.context(aa=True)
    keep = get(judged("fused_adamw", {"baseline": 1e5, "again": other}, where), "fused_adamw.keep")
    says(keep, IMPOSSIBLE, "difference between equal arms")


@pytest.mark.parametrize("phase", ["fused_adamw", "bucket_sweep"])
@pytest.mark.parametrize("profile", ["a100x2_pcie4", "cpu"])
def test_an_a_a_of_equal_arms_is_a_tie(phase: str, profile: str) -> None:
    where = builder.context(profile, aa=True)
    row = {"fused_adamw": "keep", "bucket_sweep": "best"}[phase]
    check = get(judged(phase, {}, where), f"{phase}.{row}")
    assert check.outcome is Outcome.PASS and check.reason.startswith("TIE")


def _beside_a_neighbor(made: LaunchEvidence) -> LaunchEvidence:
    """In two of three rounds the second arm is slow, in one of seven the first."""
    table = made.training.frame.copy()
    second = table["arm"] != table["arm"].iloc[0]
    busy = (second & (table["block"] % 3 > 0)) | (~second & (table["block"] % 7 == 3))
    table["dt_s"] *= busy.map({True: 1.0, False: 0.7})
    table["toks_per_s"] = table["tokens"] / table["dt_s"]
    return noisy(replace(made, training=replace(made.training, frame=table)))


@pytest.mark.parametrize(("phase", "what"), [("fused_adamw", "keep"), ("bucket_sweep", "best")])
def test_a_difference_that_a_neighbor_made_decides_nothing(phase: str, what: str) -> None:
    for aa in (True, False):
        where = builder.context(aa=aa)
        arms = list(registry.phases()[phase].values(where))  # type: ignore[attr-defined]
        rates = {arm: 1e5 * 0.8 ** (index > 1) for index, arm in enumerate(arms)}
        found = builder.evidence(phase, where, rates=rates, change=_beside_a_neighbor)
        judgement = builder.judge(phase, found, where)
        says(get(judgement, f"{phase}.{what}"), UNDECIDED, "changed its pace")
        assert "1" not in judgement.choices.values()


def test_where_nothing_is_gated_an_undecided_sweep_keeps_the_configured_value() -> None:
    where = builder.context("cpu")
    found = builder.evidence("bucket_sweep", where, change=_beside_a_neighbor, rates={"1": 5e4})
    judgement = builder.judge("bucket_sweep", found, where)
    assert get(judgement, "bucket_sweep.best").outcome is Outcome.PASS
    assert judgement.choices == {"NSA_DDP_BUCKET_MB": "0.5"}


def test_fused_that_learns_otherwise_is_dropped() -> None:
    def worse(table: Any) -> Any:
        return table["loss"] + 0.3 * (table["arm"] == "fused")

    found = builder.evidence("fused_adamw", WHERE, change=spoil.columns(loss=worse))
    judgement = builder.judge("fused_adamw", found, WHERE)
    assert said(get(judgement, "fused_adamw.loss_parity")) == WARNED
    keep = says(get(judgement, "fused_adamw.keep"), WARNED)
    assert keep.reason.startswith("WARNING: DROP")
    assert judgement.choices == {}


FAULTS = [LaunchStatus.HUNG, LaunchStatus.CRASHED, LaunchStatus.NON_FINITE]


@pytest.mark.parametrize("status", FAULTS)
def test_fused_that_ends_the_launch_is_dropped_and_the_phase_passes(status: LaunchStatus) -> None:
    # 24 rows of the control, then 10 of the fused arm.
    found = builder.evidence("fused_adamw", WHERE, change=spoil.ended(status, rows=34))
    judgement = builder.judge("fused_adamw", found, WHERE)
    for what in ("completed", "keep"):
        check = says(get(judgement, f"fused_adamw.{what}"), WARNED)
        assert "dropped" in check.reason or "DROP" in check.reason
    outcomes = {check.outcome for check in judgement.checks}
    assert outcomes == {Outcome.PASS, Outcome.SKIPPED}
    assert judgement.choices == {}


@pytest.mark.parametrize(
    ("status", "rows", "completed"),
    [
        (LaunchStatus.HUNG, 10, (Outcome.FAIL, Reason.HANG)),
        # What we cut off ourselves is no fault of the fused arm.
        (LaunchStatus.TIMED_OUT, 34, (Outcome.INCOMPLETE, Reason.TIMEOUT)),
    ],
)
def test_an_end_that_is_not_the_fused_arms_leaves_nothing_to_keep(
    status: LaunchStatus, rows: int, completed: tuple[Outcome, Reason]
) -> None:
    found = builder.evidence("fused_adamw", WHERE, change=spoil.ended(status, rows=rows))
    judgement = builder.judge("fused_adamw", found, WHERE)
    assert said(get(judgement, "fused_adamw.completed")) == completed
    assert get(judgement, "fused_adamw.keep").outcome is Outcome.INCOMPLETE


def test_a_refused_fused_arm_is_dropped_while_the_rest_is_judged() -> None:
    def refused(made: LaunchEvidence) -> LaunchEvidence:
        failure = ({"arm": "fused", "error": "fused=True needs CUDA"},)
        table = made.training.frame[made.training.frame["arm"] != "fused"].copy()
        table["step"] = range(1, len(table) + 1)
        log = replace(made.training, frame=table)
        spoken = spoil.every_rank(arm_failures=failure, last_step=len(table))(made)
        return replace(spoken, training=log)

    found = builder.evidence("fused_adamw", WHERE, change=refused)
    judgement = builder.judge("fused_adamw", found, WHERE)
    assert get(judgement, "fused_adamw.completed").outcome is Outcome.PASS
    assert get(judgement, "fused_adamw.plausible").outcome is Outcome.PASS
    says(get(judgement, "fused_adamw.keep"), WARNED, "fused=True needs CUDA")


def test_in_launches_of_its_own_a_hanging_fused_arm_is_dropped_too() -> None:
    where = builder.context(protocol="launches")
    hung = spoil.ended(LaunchStatus.HUNG, rows=20)
    found = builder.evidence("fused_adamw", where, change=hung, only=["fused_r1"])
    judgement = builder.judge("fused_adamw", found, where)
    assert said(get(judgement, "fused_adamw.completed")) == WARNED
    assert get(judgement, "fused_adamw.keep").reason.startswith("WARNING: DROP")
    assert (
        answers.row("fused_adamw", "completed", hung, where, only=["baseline_r1"]).outcome
        is Outcome.FAIL
    )


def test_on_a_cpu_an_undecided_speed_leaves_the_toggle_unset_and_passes() -> None:
    where = builder.context("cpu")

    found = builder.evidence("fused_adamw", where, change=spoil.jitter(0.3))
    judgement = builder.judge("fused_adamw", found, where)
    keep = says(get(judgement, "fused_adamw.keep"), (Outcome.PASS, Reason.NOT_GATED))
    assert keep.reason.startswith("not gated on profile cpu, nothing was decided: ")
    assert "INCONCLUSIVE" not in keep.reason and "NSA_OPT_FUSED stays as it is" in keep.reason
    assert judgement.choices == {}
