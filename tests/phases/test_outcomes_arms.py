"""Bucket sweep, fused AdamW and the SDPA audit: arms in one launch, or in their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from runbook import registry
from runbook.records import Check, LaunchStatus, Outcome, Reason
from runbook.records.evidence import LaunchEvidence, PhaseEvidence
from runbook.records.phase import Judgement, PlanContext
from tests.phases import builder

PHASES = registry.phases()

WHERE = builder.context()
WARNED = (Outcome.PASS, Reason.WARNING)


def said(check: Check) -> tuple[Outcome, Reason]:
    return check.outcome, check.code


def noisy(made: LaunchEvidence) -> LaunchEvidence:
    """Five percent of jitter from step to step."""
    assert made.training is not None
    return replace(made, training=builder.jittered(made.training, 0.05))


def judged(
    phase: str, rates: Mapping[str, float], where: PlanContext = WHERE, *, jitter: bool = True
) -> Judgement:
    change = noisy if jitter else None
    found = builder.evidence(phase, where, rates=rates, change=change)
    return builder.judge(phase, found, where)


def get(judgement: Judgement, check_id: str) -> Check:
    return {check.id: check for check in judgement.checks}[check_id]


# Bucket sweep


def test_a_clearly_better_bucket_wins_and_is_chosen() -> None:
    judgement = judged("bucket_sweep", {"25": 1.1e5, "50": 1e5, "100": 1e5})
    best = get(judgement, "bucket_sweep.best")
    assert best.outcome is Outcome.PASS and best.reason.startswith("WINNER")
    assert judgement.choices == {"NSA_DDP_BUCKET_MB": "25"}
    assert best.measurement is not None and best.measurement.interval is not None


def test_equal_buckets_tie_and_the_configured_one_stays_whatever_the_seeds_rule_says() -> None:
    judgement = judged("bucket_sweep", {"25": 1.0005e5, "50": 1e5, "100": 1e5})
    best = get(judgement, "bucket_sweep.best")
    assert best.outcome is Outcome.PASS and best.reason.startswith("TIE")
    assert "the configured 50 MB stays" in best.reason
    assert judgement.choices == {"NSA_DDP_BUCKET_MB": "50"}
    assert "by the seeds' rule alone" in judgement.notes[0]


def test_the_bucket_table_has_a_row_for_each_size_with_the_last_50_steps() -> None:
    judgement = judged("bucket_sweep", {"25": 9e4, "50": 1e5, "100": 8e4}, jitter=False)
    (table,) = judgement.tables
    assert [row[0] for row in table.rows] == ["25", "50", "100"]
    assert [row[1] for row in table.rows] == pytest.approx([9e4, 1e5, 8e4])
    assert [row[3] for row in table.rows] == [50, 50, 50]


def test_too_few_rounds_are_inconclusive() -> None:
    document: dict[str, Any] = WHERE.profile.model_dump(mode="json")
    document["phases"]["bucket_sweep"]["rounds"] = 2
    where = builder.with_profile(WHERE, phases=document["phases"])
    best = get(judged("bucket_sweep", {}, where), "bucket_sweep.best")
    assert best.outcome is Outcome.INCONCLUSIVE


def test_an_a_a_run_ties_and_chooses_nothing() -> None:
    where = builder.context(aa=True)
    judgement = judged("bucket_sweep", {}, where)
    best = get(judgement, "bucket_sweep.best")
    assert best.outcome is Outcome.PASS and best.reason.startswith("TIE")
    assert judgement.choices == {}


def test_an_a_a_run_with_a_winner_condemns_the_measurement() -> None:
    where = builder.context(aa=True)
    judgement = judged("bucket_sweep", {"a": 1e5, "again": 1.2e5}, where)
    assert said(get(judgement, "bucket_sweep.best")) == (Outcome.INVALID, Reason.NOT_PLAUSIBLE)


def same_buckets(made: LaunchEvidence) -> LaunchEvidence:
    one = tuple({**event, "sizes_mib": [50.0, 50.0]} for event in made.ranks[0].ddp_buckets)
    return builder.every_rank(ddp_buckets=one)(made)


def one_bucket(made: LaunchEvidence) -> LaunchEvidence:
    one = tuple({**event, "sizes_mib": [8.0]} for event in made.ranks[0].ddp_buckets)
    return builder.every_rank(ddp_buckets=one)(made)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (same_buckets, "same buckets"),
        (one_bucket, "one bucket of 8.00 MiB"),
        (builder.every_rank(ddp_buckets=()), "no bucket sizes logged"),
        (builder.without_effect("NSA_DDP_BUCKET_MB", arm="25"), "in arm 25: did nothing"),
    ],
)
def test_buckets_that_did_not_differ_decide_nothing(change: builder.Change, text: str) -> None:
    found = builder.evidence("bucket_sweep", WHERE, change=change, rates={"25": 2e5})
    judgement = builder.judge("bucket_sweep", found, WHERE)
    for what in ("buckets_differ", "best"):
        check = get(judgement, f"bucket_sweep.{what}")
        assert said(check) == (Outcome.INVALID, Reason.NO_EFFECT) and text in check.reason
    assert judgement.choices == {}


def test_an_arm_that_failed_fails_the_sweep() -> None:
    failure = ({"arm": "100", "error": "out of buffers"},)
    found = builder.evidence("bucket_sweep", WHERE, change=builder.rank(0, arm_failures=failure))
    check = builder.row("bucket_sweep", "arms_complete", found, WHERE)
    assert said(check) == (Outcome.FAIL, Reason.CRASH) and "out of buffers" in check.reason


def with_baseline(rates: tuple[float, ...] = (1e5, 1.01e5, 0.99e5)) -> dict[str, PhaseEvidence]:
    launches = {
        launch.name: builder.healthy(launch, WHERE.profile, rate=rate)
        for launch, rate in zip(PHASES["baseline"].plan(WHERE), rates, strict=True)
    }
    return {"baseline": PhaseEvidence(launches=launches)}


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        (1.0e5, (Outcome.PASS, Reason.OK)),
        (1.03e5, (Outcome.PASS, Reason.OK)),
        (2.5e5, (Outcome.INVALID, Reason.NOT_COMPARABLE)),
        (0.5e5, (Outcome.INVALID, Reason.NOT_COMPARABLE)),
    ],
)
@pytest.mark.parametrize("phase", ["bucket_sweep", "fused_adamw"])
def test_the_control_arm_has_to_reproduce_the_baseline(
    phase: str, rate: float, expected: tuple[Outcome, Reason]
) -> None:
    found = builder.evidence(phase, WHERE, rate=rate, earlier=with_baseline())
    check = builder.row(phase, "control", found, WHERE)
    assert said(check) == expected, check.reason


def test_a_control_on_another_config_is_not_comparable() -> None:
    found = builder.evidence(
        "bucket_sweep", WHERE, earlier=with_baseline(), change=builder.effective(seq_len=128)
    )
    check = builder.row("bucket_sweep", "control", found, WHERE)
    assert said(check) == (Outcome.INVALID, Reason.NOT_COMPARABLE) and "seq_len" in check.reason


def test_without_a_baseline_there_is_no_control() -> None:
    found = builder.evidence("bucket_sweep", WHERE)
    assert builder.row("bucket_sweep", "control", found, WHERE).code is Reason.NOT_ASKED_FOR


def test_one_launch_per_arm_and_round_is_judged_alike() -> None:
    where = builder.context(protocol="launches")
    speed = {"25": 1.2e5, "50": 1e5, "100": 1e5}
    launches = {}
    for number, launch in enumerate(PHASES["bucket_sweep"].plan(where)):
        rate = speed[launch.name.split("_")[0]] * (1 + 0.002 * (number % 4))
        launches[launch.name] = builder.healthy(launch, where.profile, rate=rate)
    judgement = builder.judge("bucket_sweep", PhaseEvidence(launches=launches), where)
    assert get(judgement, "bucket_sweep.best").reason.startswith("WINNER")
    assert judgement.choices == {"NSA_DDP_BUCKET_MB": "25"}
    assert len(judgement.tables[0].rows) == 12


@pytest.mark.parametrize(("phase", "what"), [("bucket_sweep", "best"), ("fused_adamw", "keep")])
def test_arms_of_different_commits_choose_nothing(phase: str, what: str) -> None:
    where = builder.context(protocol="launches")
    last = PHASES[phase].plan(where)[-1].name

    def newer(made: LaunchEvidence) -> LaunchEvidence:
        found = dict(made.env or {})
        return replace(made, env={**found, "git": {**found["git"], "sha": "2" * 40}})

    found = builder.evidence(phase, where, change=newer, only=[last])
    judgement = builder.judge(phase, found, where)
    assert said(get(judgement, f"{phase}.{what}")) == (Outcome.INVALID, Reason.NOT_COMPARABLE)
    assert judgement.choices == {}


def test_the_seeds_protocol_gives_a_table_and_no_decision() -> None:
    where = builder.context(protocol="seed")
    judgement = builder.judge("bucket_sweep", builder.evidence("bucket_sweep", where), where)
    assert get(judgement, "bucket_sweep.best").outcome is Outcome.INCONCLUSIVE
    assert [row[3] for row in judgement.tables[0].rows] == [50, 50, 50]


@pytest.mark.parametrize("phase", ["bucket_sweep", "fused_adamw"])
def test_a_run_may_stop_when_the_answer_is_known(phase: str) -> None:
    (launch,) = PHASES[phase].plan(WHERE)
    clear = builder.healthy(launch, WHERE.profile, rates={"25": 2e5, "fused": 2e5})
    assert clear.training is not None
    log = builder.jittered(clear.training, 0.01)
    assert PHASES[phase].enough(log, launch, WHERE)
    assert launch.schedule is not None
    row = len(launch.schedule.rounds[0]) * (launch.schedule.steps + launch.schedule.warmup_steps)
    early = replace(log, frame=log.frame.iloc[: 2 * row])
    assert not PHASES[phase].enough(early, launch, WHERE)
    assert not PHASES[phase].enough(replace(log, frame=log.frame.iloc[:0]), launch, WHERE)


# Fused AdamW


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


# SDPA audit


def audited(change: builder.Change | None = None) -> Judgement:
    return builder.judge("sdpa_audit", builder.evidence("sdpa_audit", WHERE, change=change), WHERE)


def kernels(**found: str) -> builder.Change:
    return builder.parts(
        audit=builder.audit({"cmp": "explicit_softmax", "sel": "flash", "win": "flash", **found})
    )


def test_an_unexpected_fallback_fails() -> None:
    check = get(audited(kernels(sel="math")), "sdpa_audit.kernels")
    assert said(check) == (Outcome.FAIL, Reason.MISMATCH)
    assert "sel: math, expected triton or flash" in check.reason and check.remedy


def test_the_kernel_table_names_every_branch_of_every_arm() -> None:
    (table,) = audited().tables
    assert table.rows[0] == ("default", "explicit_softmax", "flash", "flash")
    assert table.rows[2] == ("no_flash", "explicit_softmax", "efficient", "efficient")


@pytest.mark.parametrize("what", ["audited", "kernels"])
def test_an_audit_that_saw_nothing_is_invalid(what: str) -> None:
    for change in (builder.parts(audit=None), builder.parts(audit=builder.audit({"cmp": "x"}))):
        check = get(audited(change), f"sdpa_audit.{what}")
        assert said(check) == (Outcome.INVALID, Reason.NO_EFFECT)
        assert "NSA_SDPA_AUDIT=1" in check.remedy or "profile" in check.remedy


def test_an_audit_without_its_toggle_is_invalid() -> None:
    change = builder.without_effect("NSA_SDPA_AUDIT")
    assert said(get(audited(change), "sdpa_audit.audited")) == (Outcome.INVALID, Reason.NO_EFFECT)


def refused(*arms: str) -> builder.Change:
    failures = tuple({"arm": arm, "error": "no kernel for this mask"} for arm in arms)
    return builder.rank(0, arm_failures=failures)


def test_one_unusable_setting_is_an_answer() -> None:
    judgement = audited(refused("flash_only"))
    flash = get(judgement, "sdpa_audit.flash_only")
    assert said(flash) == WARNED and "no kernel for this mask" in flash.reason
    assert get(judgement, "sdpa_audit.stable").outcome is Outcome.PASS


def test_two_unusable_settings_are_a_no_go() -> None:
    stable = get(audited(refused("flash_only", "no_flash")), "sdpa_audit.stable")
    assert said(stable) == (Outcome.FAIL, Reason.CRASH)


def test_a_setting_that_did_nothing_is_invalid() -> None:
    judgement = audited(builder.without_effect("NSA_SDPA_NO_FLASH"))
    assert said(get(judgement, "sdpa_audit.no_flash")) == (Outcome.INVALID, Reason.NO_EFFECT)


def test_a_crash_in_the_flash_arm_spares_the_audit_of_the_default() -> None:
    judgement = audited(builder.ended(LaunchStatus.CRASHED, rows=60))
    assert said(get(judgement, "sdpa_audit.completed")) == WARNED
    assert get(judgement, "sdpa_audit.kernels").outcome is Outcome.PASS
    assert said(get(judgement, "sdpa_audit.flash_only")) == WARNED
    assert get(judgement, "sdpa_audit.no_flash").outcome is Outcome.INCOMPLETE


def test_a_crash_in_the_default_arm_fails() -> None:
    judgement = audited(builder.ended(LaunchStatus.CRASHED, rows=20))
    assert said(get(judgement, "sdpa_audit.completed")) == (Outcome.FAIL, Reason.CRASH)
