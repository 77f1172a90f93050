"""What a phase says: one row, or the whole judgement, of evidence made by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from phases.kit.finding import Finding
from phases.kit.playbook import Situation
from runbook.config.phase import Judgement, PlanContext
from runbook.records import Check, Outcome, Reason
from tests.phases import builder, spoil

Answer = TypeVar("Answer", Check, Finding)
WHERE = builder.context()
NOTHING = (Outcome.INCOMPLETE, Reason.MISSING_ARTIFACT)
TOO_MUCH = (Outcome.FAIL, Reason.ABOVE_LIMIT)
WARNED = (Outcome.PASS, Reason.WARNING)
FINE = (Outcome.PASS, Reason.OK)
NO_EFFECT = (Outcome.INVALID, Reason.NO_EFFECT)
OTHERWISE = (Outcome.INVALID, Reason.MISMATCH)
IMPOSSIBLE = (Outcome.INVALID, Reason.NOT_PLAUSIBLE)
UNLIKE = (Outcome.INVALID, Reason.NOT_COMPARABLE)
DAMAGED = (Outcome.INVALID, Reason.DAMAGED_ARTIFACT)
NOT_FINITE = (Outcome.FAIL, Reason.NON_FINITE)
WRONG = (Outcome.FAIL, Reason.MISMATCH)
CRASHED = (Outcome.FAIL, Reason.CRASH)
TOO_LITTLE = (Outcome.FAIL, Reason.BELOW_LIMIT)
UNBALANCED = (Outcome.FAIL, Reason.UNBALANCED)
NOT_LEARNING = (Outcome.FAIL, Reason.NOT_LEARNING)
MACHINE = (Outcome.INVALID, Reason.WRONG_ENVIRONMENT)
NOT_RUN = (Outcome.INCOMPLETE, Reason.NOT_RUN)
UNCOLLECTED = (Outcome.INCOMPLETE, Reason.NOTHING_COLLECTED)
TOO_FEW = (Outcome.INCONCLUSIVE, Reason.TOO_FEW_SAMPLES)
UNDECIDED = (Outcome.INCONCLUSIVE, Reason.UNDECIDED)
NOT_GATED = (Outcome.SKIPPED, Reason.NOT_GATED)
NEEDS_CUDA = (Outcome.SKIPPED, Reason.NEEDS_CUDA)
NOT_ASKED_FOR = (Outcome.SKIPPED, Reason.NOT_ASKED_FOR)


def said(check: Check | Finding) -> tuple[Outcome, Reason]:
    """What a row answered, and by which reason."""
    return check.outcome, check.code


def get(judgement: Judgement, check_id: str) -> Check:
    """One row of a judgement."""
    return {check.id: check for check in judgement.checks}[check_id]


def row(
    phase: str,
    what: str,
    change: spoil.Change | None = None,
    where: PlanContext = WHERE,
    **options: Any,
) -> Check:
    """One row of a phase whose healthy launches were changed; options as of `evidence`."""
    return builder.row(phase, what, builder.evidence(phase, where, change=change, **options), where)


noisy = spoil.jitter(0.05)


def judged(
    phase: str, rates: Mapping[str, float], where: PlanContext = WHERE, *, jitter: bool = True
) -> Judgement:
    """The judgement of an A/B phase whose arms run at these rates."""
    change = noisy if jitter else None
    found = builder.evidence(phase, where, rates=rates, change=change)
    return builder.judge(phase, found, where)


def says(
    check: Answer,
    wanted: tuple[Outcome, Reason],
    *words: str,
    remedy: str = "",
    evidence: str = "",
) -> Answer:
    """Assert outcome and reason of a row, what its sentence and its remedy say, and a file."""
    assert said(check) == wanted, check.reason
    for one in words:
        assert one in check.reason, check.reason
    if remedy:
        assert remedy in check.remedy, check.remedy
    assert not evidence or any(evidence in path for path in check.evidence), check.evidence
    return check


def case(
    phase: str,
    what: str,
    change: spoil.Change | None,
    wanted: tuple[Outcome, Reason],
    *words: str,
    remedy: str = "",
    evidence: str = "",
    called: str = "",
    **options: Any,
) -> Any:
    """A line of a table: the row of the changed launches says this. Options as of `row`."""

    def holds() -> None:
        check = row(phase, what, change, **options)
        says(check, wanted, *words, remedy=remedy, evidence=evidence)

    return pytest.param(holds, id=called or "-".join([what, *words[:1]])[:50])


# Two situations that remedies have to fit.

ON_TWO_A100 = Situation(
    device="cuda", ranks=2, dtype="bf16", seq_len=2048, pcie=True, folder="baseline/run1"
)
ON_A_CPU = replace(ON_TWO_A100, device="cpu", dtype="fp32", seq_len=128, pcie=False)
