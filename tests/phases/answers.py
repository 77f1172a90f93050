"""What a phase says: one row, or the whole judgement, of evidence made by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from phases.kit.finding import Finding
from phases.kit.playbook import Situation
from runbook.config.registry import Judgement, PlanContext
from runbook.records import Check
from tests.phases import builder, spoil
from tests.said import hold

Answer = TypeVar("Answer", Check, Finding)
WHERE = builder.context()


def said(check: Check | Finding) -> str:
    """What a row answered, and by which reason: `FAIL above_limit`."""
    return f"{check.outcome} {check.code}"


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


def says(check: Answer, wanted: str, *words: str, remedy: str = "", evidence: str = "") -> Answer:
    """Assert what a row answered, what its sentence and its remedy say, and a file."""
    assert said(check) == wanted, check.reason
    for one in words:
        assert one in check.reason, check.reason
    if remedy:
        assert remedy in check.remedy, check.remedy
    assert not evidence or any(evidence in path for path in check.evidence), check.evidence
    hold(check)
    return check


def case(
    phase: str, what: str, change: spoil.Change | None, wanted: str, *words: str, **options: Any
) -> Any:
    """A line of a table: the row of the changed launches says this. Options of `row` and `says`."""
    told = {name: options.pop(name) for name in ("remedy", "evidence") if name in options}
    name = options.pop("called", "-".join([what, *words[:1]])[:50])
    return pytest.param(
        lambda: says(row(phase, what, change, **options), wanted, *words, **told), id=name
    )


# Two situations that remedies have to fit.

ON_TWO_A100 = Situation(
    device="cuda", ranks=2, dtype="bf16", seq_len=2048, pcie=True, folder="baseline/run1"
)
ON_A_CPU = replace(ON_TWO_A100, device="cpu", dtype="fp32", seq_len=128, pcie=False)
