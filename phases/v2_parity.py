"""Selection v2: the same answers as v1, and faster."""

from __future__ import annotations

from collections.abc import Sequence

from phases.base import PlanContext
from phases.common.case import Case
from phases.common.commands import pytest_launch
from phases.common.finding import Finding, skipped
from phases.common.junit import judge_cases
from phases.common.rows import Row, RowPhase
from runbook.evidence import JUnitCase
from runbook.records import Launch, Outcome, Reason

__all__ = ["V2Parity"]

_PARITY, _SPEED = "parity", "speed"
_PATTERNS = "test_equivalence_various_patterns"
_FASTER = "test_v2_performance_improvement"


class V2Parity(RowPhase):
    """Seed 000, "Selection V2 Parity & Performance (CUDA)"."""

    name = "v2_parity"
    title = "Selection v2 parity and speed"
    source = "seed 000, Selection V2 Parity & Performance (CUDA)"
    question = "Do the vectorised selection ranges give what the plain ones give, faster?"

    def plan(self, context: PlanContext) -> list[Launch]:
        """The two shipped tests that the seed names."""
        return [
            pytest_launch(
                context,
                phase=self.name,
                name=_PARITY,
                modules=("test_selection_v2_equiv",),
                select="equivalence_various_patterns",
                env={"NSA_TEST_SEL_PACK": "1"},
                purpose="indices, outputs and gradients of v1 and v2",
            ),
            pytest_launch(
                context,
                phase=self.name,
                name=_SPEED,
                modules=("test_performance_guards",),
                select="v2_performance_improvement",
                purpose="v1 and v2 in alternated blocks",
            ),
        ]

    def rows(self, context: PlanContext) -> Sequence[Row]:
        """Parity, the pattern that failed once, and speed."""
        del context
        return (
            Row(
                what="parity",
                question="Are indices, outputs and gradients of v1 and v2 equal?",
                answer=lambda case: judge_cases(case, _PARITY, "v2 parity", _is_parity),
                topic="v2",
            ),
            Row(
                what="gaps",
                question="Are they equal for selections with gaps?",
                answer=lambda case: judge_cases(case, _PARITY, "the pattern gaps", _is_gaps),
                topic="v2",
            ),
            Row(
                what="faster",
                question="Is v2 faster than v1?",
                answer=_faster,
                topic="v2",
            ),
        )


def _is_parity(test: JUnitCase) -> bool:
    return test.name.startswith(_PATTERNS)


def _is_gaps(test: JUnitCase) -> bool:
    return _is_parity(test) and "gaps" in test.name


def _is_speed(test: JUnitCase) -> bool:
    return test.name.startswith(_FASTER)


def _faster(case: Case) -> Finding:
    """Speed means nothing without parity, and is not gated where times are not."""
    finding = judge_cases(case, _SPEED, "v2 speed", _is_speed)
    if not case.profile.throughput_gated and finding.outcome is Outcome.FAIL:
        reason = f"{finding.reason}; times are not gated on profile {case.profile.name}"
        return skipped(Reason.NOT_GATED, reason, measurement=finding.measurement)
    return finding
