"""Whatever is missing, every row is there, none passes for want of evidence, and none is mute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runbook.config import registry
from runbook.records import Check, LaunchResult, LaunchStatus, Outcome, Reason, Verdict, judge_run
from runbook.records.evidence import LaunchEvidence, PhaseEvidence
from tests.factory.tables import rows, table
from tests.phases import answers, builder, spoil
from tests.phases.answers import said, says
from tests.tiers import examples

PHASES = registry.phases()

REFUSED = (LaunchStatus.CONFIG_ERROR, LaunchStatus.ENVIRONMENT_ERROR)
PROFILES = ("a100x2_pcie4", "h200x1", "cpu")
# What a launch may fail to leave behind.
PARTS: dict[str, Any] = {
    **dict.fromkeys(("training", "gates", "env", "audit", "profile", "ceilings", "junit", "load")),
    **dict.fromkeys(("gpu_samples", "devices_before", "devices_after", "kernel_log", "checkout")),
    **dict.fromkeys(("ranks", "console_lines"), ()),
}
# Decided by the plan alone, without any evidence.
PLANNED = {"preflight.prefill"}


def _needed(check: Check) -> tuple[str, ...]:
    """The phases that have to run again before this one, for this row."""
    phase: Any = PHASES[check.phase]
    (row,) = (
        row for row in phase.asked(builder.context("cpu")) if row.what == check.id.partition(".")[2]
    )
    return (*row.needs, *phase.needs)


def assert_whole(checks: tuple[Check, ...]) -> None:
    for check in checks:
        assert check.question and check.reason, check.id
        if check.outcome not in (Outcome.PASS, Outcome.SKIPPED):
            assert check.remedy, check.id
            phases = ",".join((*_needed(check), check.phase))
            assert check.rerun.startswith(f"runbook run --phase {phases} --profile "), check.id


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("phase", PHASES)
def test_with_no_evidence_at_all(phase: str, profile: str) -> None:
    where = builder.context(profile)
    checks = tuple(builder.judge(phase, PhaseEvidence(), where).checks)
    assert_whole(checks)
    passed = {check.id for check in checks if check.outcome is Outcome.PASS}
    assert passed <= PLANNED
    required = [check.id for check in checks if check.required] or [checks[0].id]
    assert judge_run(checks, required) is not Verdict.GO


@table(__file__, "endings")
def test_how_a_launch_ended_is_what_completed_says(ended: str, wanted: str) -> None:
    status = LaunchStatus(ended)
    check = says(answers.row("nvtx", "completed", spoil.ended(status)), wanted)
    if status in REFUSED:
        assert check.reason == 'the trainer cannot run here: "made up"'
    elif status is not LaunchStatus.NOT_RUN:
        assert "rank 1" in check.reason and "stacks.txt" in check.evidence


def test_each_end_is_in_the_table() -> None:
    told = {one["ended"] for one in rows(__file__, "endings")}
    assert told == set(LaunchStatus) - {LaunchStatus.COMPLETED}


@pytest.mark.parametrize("status", REFUSED)
@pytest.mark.parametrize("profile", ["a100x2_pcie4", "cpu"])
@pytest.mark.parametrize("protocol", ["blocks", "launches"])
def test_a_wrong_machine_or_config_is_one_cause_in_every_row(
    profile: str, status: LaunchStatus, protocol: str
) -> None:
    """Nothing is FAIL or INCOMPLETE beside it, in no phase: the trainer was never tested."""
    where = builder.context(profile, protocol=protocol)
    change = spoil.ended(status, rows=0, cause="no CUDA device 0")

    first: dict[str, str] = {}

    def nothing_left(made: LaunchEvidence) -> LaunchEvidence:
        """Refused; the others of its phase were then not started."""
        left = replace(change(made), ranks=(), env=None, training=None, junit=None, ceilings=None)
        name = first.setdefault(made.launch.phase, made.launch.name)
        if name == made.launch.name:
            return left
        cause = f"{name} was refused: {left.result.cause}"
        return replace(left, result=LaunchResult(status=LaunchStatus.NOT_RUN, cause=cause))

    earlier = {"baseline": builder.evidence("baseline", where, change=nothing_left)}
    for phase in (phase for phase in PHASES if phase != "preflight"):
        found = builder.evidence(phase, where, change=nothing_left, earlier=earlier)
        checks = [c for c in builder.judge(phase, found, where).checks if c.id not in PLANNED]
        told = [check for check in checks if check.outcome is not Outcome.SKIPPED]
        text = 'the trainer cannot run here: "no CUDA device 0"'
        answers = {(said(check), check.reason) for check in told}
        assert answers == {("INVALID wrong_environment", text)}, phase
        assert len({check.remedy for check in told}) == 1


@examples(60)
@given(
    phase=st.sampled_from(list(PHASES)),
    profile=st.sampled_from(["a100x2_pcie4", "cpu"]),
    gone=st.sets(st.sampled_from([*PARTS, "trace"])),
    status=st.sampled_from([LaunchStatus.COMPLETED, LaunchStatus.HUNG, LaunchStatus.TIMED_OUT]),
)
def test_taking_evidence_away_never_makes_a_row_pass(
    phase: str, profile: str, gone: set[str], status: LaunchStatus
) -> None:
    where = builder.context(profile)
    whole = builder.evidence(phase, where)
    before = builder.healthy_checks(phase, profile)
    left = {
        name: replace(
            made,
            result=made.result.model_copy(update={"status": status}),
            files={kind: file for kind, file in made.files.items() if kind not in gone},
            **{part: PARTS[part] for part in gone if part in PARTS},
        )
        for name, made in whole.launches.items()
    }
    checks = tuple(builder.judge(phase, replace(whole, launches=left), where).checks)
    assert_whole(checks)
    for check in checks:
        if check.outcome is Outcome.PASS and check.code is not Reason.WARNING:
            assert before[check.id].outcome is Outcome.PASS, check.reason
