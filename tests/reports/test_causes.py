"""What went wrong, once each: which rows are folded into one cause, and which never are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from reports.causes import Cause
from reports.view import build_view
from runbook.engine import record_of
from runbook.engine.starting import held_back, not_run
from runbook.records import (
    THE_RUN,
    Check,
    Kind,
    LaunchEntry,
    LaunchResult,
    LaunchStatus,
    Outcome,
    PhaseRecord,
    Reason,
    Verdict,
)
from runbook.records.evidence import LaunchEvidence
from tests.factory.records import check
from tests.phases import builder
from tests.reports.samples import run

WHERE = builder.with_launches(builder.context("cpu"), 3)


def ended(status: LaunchStatus, cause: str, **fields: object) -> LaunchResult:
    given: dict[str, object] = {"status": status, "cause": cause} | fields
    return LaunchResult.model_validate(given)


def nan(step: int) -> LaunchResult:
    return ended(LaunchStatus.NON_FINITE, f"non-finite at step {step}: loss nan")


def hang(rank: int, **fields: object) -> LaunchResult:
    text = f"hang: rank {rank} silent for 21.0 s in phase step at step 7 (budget 20 s)"
    return ended(LaunchStatus.HUNG, text, culprit_rank=rank, **fields)


def crash(text: str, **fields: object) -> LaunchResult:
    return ended(LaunchStatus.CRASHED, text, culprit_rank=0, **fields)


def phase(name: str, *results: LaunchResult | None) -> PhaseRecord:
    """A shipped phase judged with its launches ended like this; None for a good end."""
    found = builder.evidence(name, WHERE)
    for key, result in zip(found.launches, results, strict=False):
        if result is not None:
            launches = {**found.launches, key: _broken(found.launches[key], result)}
            found = replace(found, launches=launches)
    judgement = builder.judge(name, found, WHERE)
    entries = [LaunchEntry(launch=e.launch, result=e.result) for e in found.launches.values()]
    return record_of(builder.PHASES[name], judgement, entries, started_at="t", duration_s=1.0)


def _broken(made: LaunchEvidence, result: LaunchResult) -> LaunchEvidence:
    kept = replace(made, result=result)
    return replace(kept, training=None, env=None, ranks=()) if not result.attempts else kept


def of(*phases: PhaseRecord, **fields: object) -> tuple[Cause, ...]:
    checks = [check for one in phases for check in one.checks]
    required = [c.id for c in checks if c.id in WHERE.profile.required]
    return build_view(run(Verdict.NO_GO, phases, required=tuple(required), **fields)).causes


def row(name: str, outcome: Outcome, code: Reason, reason: str, **fields: object) -> Check:
    given = {"remedy": "do", "rerun": f"runbook run --phase {name}", "required": True} | fields
    return check(name, outcome, code, reason=reason, **given)


def by_hand(name: str, *checks: Check) -> PhaseRecord:
    return PhaseRecord(name=name, title=name, source="a test", outcome=Outcome.FAIL, checks=checks)


def lost(step: int, loss: str, norm: str = "nan") -> LaunchResult:
    """As the trainer says it: what is not finite first."""
    finite = loss.replace(".", "").isdigit()
    told = f"gradient norm {norm}, while the loss is {loss}"
    text = told if finite else f"loss {loss}, gradient norm {norm}"
    return ended(LaunchStatus.NON_FINITE, f"non-finite at step {step}: {text}")


OOM, CONFIG = LaunchStatus.OUT_OF_MEMORY, LaunchStatus.CONFIG_ERROR


@pytest.mark.parametrize(("first", "second"), [
    # All of these were one cause, whatever number was lost and on which rank.
    (lost(4, "nan on every rank"), lost(4, "inf on rank 1", "inf")),
    (lost(4, "nan on rank 0"), lost(4, "nan on rank 1")),
    (lost(4, "nan on every rank"), lost(4, "5.5", "nan")),
    (hang(0), hang(1)),
    (hang(1), hang(1, kind=Kind.FROZEN)),
    (crash("rank 0 ended: ValueError: x"), crash("rank 0 ended: KeyError: 'y'")),
    (crash("rank 0 ended: x"), crash("rank 0 ended: x", kind=Kind.DISK_FULL)),
    (ended(OOM, "rank 0: x"), ended(OOM, "rank 0: x", kind=Kind.HOST_MEMORY)),
    (ended(CONFIG, "train.lr: not a number"), ended(CONFIG, "train.steps: not a number")),
])  # fmt: skip
def test_ends_that_differ_are_not_folded(first: LaunchResult, second: LaunchResult) -> None:
    found = of(phase("baseline", first), phase("nvtx", second))
    assert [cause.launches for cause in found] == [("baseline/run1",), ("nvtx/profiled",)]
    assert found[0].remedy != found[1].remedy or first.kind is second.kind


@pytest.mark.parametrize("make", [
    lambda step: crash(f"rank 0 ended after step {step}: ValueError: x"),
    lambda step: hang(1),
    lambda step: ended(CONFIG, "train.lr: not a number"),
    lambda step: ended(OOM, f"rank 0 ended after step {step}: OOM"),
    lambda step: ended(LaunchStatus.TIMED_OUT, "timed out after 60 s"),
])  # fmt: skip
def test_the_same_end_in_two_phases_is_one(make: Callable[[int], LaunchResult]) -> None:
    (found,) = of(phase("baseline", make(3)), phase("nvtx", make(8)))
    assert set(found.launches) == {"baseline/run1", "nvtx/profiled"}


def test_two_faults_in_the_launches_of_one_phase_are_two_though_one_row_tells_of_both() -> None:
    found = of(phase("baseline", nan(4), crash("rank 0 ended after step 3: ValueError: x")))
    assert [cause.title.partition(":")[0] for cause in found] == ["baseline/run1", "baseline/run2"]
    assert "console.log" in found[1].remedy


def test_phases_that_preflight_kept_from_starting_follow_from_its_row() -> None:
    wrong = row("preflight.cuda", Outcome.INVALID, Reason.WRONG_ENVIRONMENT, "no CUDA device")
    before = by_hand("preflight", wrong)
    refused = held_back(before, always=False)
    assert refused is not None
    phases = [phase(name, refused, refused, refused) for name in ("baseline", "long_run")]
    found = of(before, *phases)
    assert len(found) == 1
    assert found[0].title == "preflight.cuda: no CUDA device"
    assert {row.phase for row in found[0].rows} == {"preflight", "baseline", "long_run"}
    assert found[0].rerun == wrong.rerun


def test_all_that_an_interruption_left_undone_is_one_cause_that_resumes() -> None:
    cut = ended(LaunchStatus.INTERRUPTED, "interrupted by SIGINT", follows=THE_RUN)
    rest = not_run("interrupted by SIGINT before it started", follows=THE_RUN)
    never = row(
        "nvtx.completed", Outcome.INCOMPLETE, Reason.INTERRUPTED, "interrupted", follows=THE_RUN
    )
    found = of(
        phase("baseline", cut, rest, rest),
        by_hand("nvtx", never),
        interrupted=True,
        options={"signal": "SIGINT", "out": "/somewhere"},
    )
    assert [cause.title for cause in found] == ["the run was interrupted by SIGINT"]
    assert found[0].rerun == "runbook run --resume 20261121T010203Z-840303b --out /somewhere"


def test_a_launch_that_was_pre_empted_goes_on_and_suspects_no_setting() -> None:
    cut = ended(LaunchStatus.PREEMPTED, "rank 1 was asked to end (SIGTERM)", steps=60)
    found = of(
        phase("baseline", None, None, cut),
        interrupted=True,
        settings={"train.lr": "1e6"},
        options={"signal": "the pre-emption of its trainer", "plan": "production"},
    )
    assert {cause.rerun for cause in found} == {"runbook launch --resume 20261121T010203Z-840303b"}
    assert found[0].lead.outcome is Outcome.INCOMPLETE
    assert "--resume" in found[0].remedy and "by hand" not in found[0].remedy


def test_evidence_is_at_most_three_paths_with_the_culprits_stack_first() -> None:
    folder = "baseline/run1"
    names = ["console.log", "flight_rank0.json", "incident.json", "stackdump_rank0_11.txt",
             "stackdump_rank1_12.txt"]  # fmt: skip
    result = hang(1, evidence=tuple(f"{folder}/{name}" for name in names))
    (cause,) = of(phase("baseline", result))
    assert cause.evidence == tuple(
        f"{folder}/{name}" for name in ("stackdump_rank1_12.txt", "incident.json", "console.log")
    )


def test_what_is_invalid_leads_the_failure_that_follows_from_it() -> None:
    """The failure led, so the report sent its reader to the trainer of a wrong machine."""
    root = row("preflight.host_copy", Outcome.INVALID, Reason.WRONG_ENVIRONMENT, "a slow link")
    follows = {"follows": root.id, "remedy": "sweep the buckets"}
    failed = row("baseline.throughput", Outcome.FAIL, Reason.BELOW_LIMIT, "23 tok/s", **follows)
    alone = row("nvtx.python_share", Outcome.FAIL, Reason.ABOVE_LIMIT, "0.6")
    found = of(by_hand("baseline", failed), by_hand("nvtx", alone), by_hand("preflight", root))
    assert [cause.title for cause in found] == [
        "preflight.host_copy: a slow link",
        "nvtx.python_share: 0.6",
    ]
    first = found[0]
    assert (first.lead.outcome, first.remedy) == (Outcome.INVALID, "do")
    assert [one.id for one in first.rows] == [root.id, failed.id]


def test_every_problem_is_in_a_cause_and_a_circle_ends() -> None:
    first = row("baseline.a", Outcome.FAIL, Reason.MISMATCH, "x", follows="baseline.b")
    second = row("baseline.b", Outcome.FAIL, Reason.MISMATCH, "y", follows="baseline.a")
    found = of(by_hand("baseline", first, second))
    assert {row.id for cause in found for row in cause.rows} == {"baseline.a", "baseline.b"}
