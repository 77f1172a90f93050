"""The SDPA audit: which kernel served which branch, and which setting is unusable."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runbook.config.phase import Judgement
from runbook.records import LaunchStatus, Outcome, Reason
from runbook.records.evidence import LaunchEvidence
from tests.phases import answers, builder, spoil, traces
from tests.phases.answers import CRASHED, NO_EFFECT, UNLIKE, WARNED, WHERE, WRONG, get, said, says


def audited(change: spoil.Change | None = None) -> Judgement:
    return builder.judge("sdpa_audit", builder.evidence("sdpa_audit", WHERE, change=change), WHERE)


def kernels(**found: str) -> spoil.Change:
    return spoil.parts(
        audit=traces.audit({"cmp": "explicit_softmax", "sel": "flash", "win": "flash", **found})
    )


def test_an_unexpected_fallback_fails() -> None:
    check = get(audited(kernels(sel="math")), "sdpa_audit.kernels")
    says(check, WRONG, "sel: math, expected only triton or flash")
    assert check.remedy


@pytest.mark.parametrize("given", ["NSA_SDPA_NO_FLASH", "NSA_DDP_SAFE_MODE"])
def test_a_fallback_of_flash_that_a_person_forbade_is_no_fault_and_no_go(given: str) -> None:
    where = replace(WHERE, toggles={given: "1"})
    check = answers.row("sdpa_audit", "kernels", kernels(sel="math"), where)
    says(check, UNLIKE, f"{given}=1 forbids flash, which the profile expects: sel: math")


def test_under_the_safe_mode_flash_only_is_not_tried_and_the_other_setting_is_enough() -> None:
    where = replace(WHERE, toggles={"NSA_DDP_SAFE_MODE": "1"})
    judgement = builder.judge("sdpa_audit", builder.evidence("sdpa_audit", where), where)
    flash = says(get(judgement, "sdpa_audit.flash_only"), (Outcome.SKIPPED, Reason.NOT_COMPARABLE))
    assert flash.reason == "NSA_DDP_SAFE_MODE=1 forbids NSA_SDPA_FLASH_ONLY=1"
    assert get(judgement, "sdpa_audit.stable").outcome is Outcome.PASS


@pytest.mark.parametrize(
    ("kernel", "right"),
    [
        ("efficient+flash", True),
        ("flash+efficient", True),
        ("cudnn+efficient", True),
        ("flash+math", False),
        ("efficient+flash+math", False),
        ("none", False),
        ("", False),
    ],
)
def test_kernels_are_a_set_in_which_one_fallback_is_still_one(kernel: str, right: bool) -> None:
    check = get(audited(kernels(win=kernel)), "sdpa_audit.kernels")
    assert (check.outcome is Outcome.PASS) is right
    assert kernel in check.reason


def test_the_kernel_table_names_every_branch_of_every_arm() -> None:
    (table,) = audited().tables
    assert table.rows[0] == ("default", "explicit_softmax", "flash", "flash")
    assert table.rows[2] == ("no_flash", "explicit_softmax", "efficient", "efficient")


@pytest.mark.parametrize("what", ["audited", "kernels"])
def test_an_audit_that_saw_nothing_is_invalid(what: str) -> None:
    for change in (spoil.parts(audit=None), spoil.parts(audit=traces.audit({"cmp": "x"}))):
        check = says(get(audited(change), f"sdpa_audit.{what}"), NO_EFFECT)
        assert "NSA_SDPA_AUDIT=1" in check.remedy or "profile" in check.remedy


def test_an_audit_without_its_toggle_is_invalid() -> None:
    change = spoil.without_effect("NSA_SDPA_AUDIT")
    assert said(get(audited(change), "sdpa_audit.audited")) == (Outcome.INVALID, Reason.NO_EFFECT)


def refused(*arms: str) -> spoil.Change:
    failures = tuple({"arm": arm, "error": "no kernel for this mask"} for arm in arms)
    return spoil.rank(0, arm_failures=failures)


def test_one_unusable_setting_is_an_answer() -> None:
    judgement = audited(refused("flash_only"))
    says(get(judgement, "sdpa_audit.flash_only"), WARNED, "no kernel for this mask")
    assert get(judgement, "sdpa_audit.stable").outcome is Outcome.PASS


def test_an_arm_that_ran_out_of_memory_says_so() -> None:
    def change(made: LaunchEvidence) -> LaunchEvidence:
        errors = ("another rank could not run it", "out of memory: CUDA out of memory. Tried 2 GiB")
        for rank, error in enumerate(errors):
            failures = ({"arm": "no_flash", "error": error},)
            made = spoil.rank(rank, arm_failures=failures)(made)
        return made

    check = get(audited(change), "sdpa_audit.no_flash")
    says(check, WARNED, "out of memory: CUDA", remedy="train.seq_len")
    assert "heartbeat_rank1" in check.evidence[0]


def test_two_unusable_settings_are_a_no_go() -> None:
    says(get(audited(refused("flash_only", "no_flash")), "sdpa_audit.stable"), CRASHED)


def test_a_setting_that_did_nothing_is_invalid() -> None:
    judgement = audited(spoil.without_effect("NSA_SDPA_NO_FLASH"))
    assert said(get(judgement, "sdpa_audit.no_flash")) == (Outcome.INVALID, Reason.NO_EFFECT)


def test_a_crash_in_the_flash_arm_spares_the_audit_of_the_default() -> None:
    judgement = audited(spoil.ended(LaunchStatus.CRASHED, rows=60))
    assert said(get(judgement, "sdpa_audit.completed")) == WARNED
    assert get(judgement, "sdpa_audit.kernels").outcome is Outcome.PASS
    assert said(get(judgement, "sdpa_audit.flash_only")) == WARNED
    assert get(judgement, "sdpa_audit.no_flash").outcome is Outcome.INCOMPLETE


def test_a_crash_in_the_default_arm_fails() -> None:
    judgement = audited(spoil.ended(LaunchStatus.CRASHED, rows=20))
    assert said(get(judgement, "sdpa_audit.completed")) == (Outcome.FAIL, Reason.CRASH)
