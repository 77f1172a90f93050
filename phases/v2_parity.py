"""Selection v2: the same answers as v1, and faster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from phases.kit.case import Case, judge_cases, report_of
from phases.kit.commands import pytest_launch
from phases.kit.finding import Finding, skipped
from phases.kit.measure import derived
from phases.kit.rows import Row, RowPhase, contract_only
from runbook.config import Limit, LimitSpec
from runbook.config.registry import PlanContext
from runbook.records import Comparator, Launch, Outcome, Reason
from runbook.records.evidence import JUnitCase

_PARITY, _SPEED = "parity", "speed"
_PATTERNS = "test_equivalence_various_patterns"
_FASTER = "test_v2_performance_improvement"
# The property in which the test records the lower 99 % bound of v1's time over v2's.
_BOUND = "v1_over_v2_ratio_lower_99"
_NOT_SLOWER = Limit(
    spec=LimitSpec(name=_BOUND, unit="ratio", comparator=Comparator.ABOVE, meaning="v2 is faster"),
    value=1.0,
    source="requirement V3; one-sided 99 % bound of alternated blocks",
    gated=True,
)


class V2Parity(RowPhase):
    """Requirements V1 to V3."""

    name = "v2_parity"
    order = 50
    title = "Selection v2 parity and speed"
    source = "requirements V1 to V3"
    question = "Do the vectorized selection ranges match the plain ones, only faster?"

    @contract_only
    def plan(self, context: PlanContext) -> list[Launch]:
        """The two shipped tests that requirements V1 and V3 name."""
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

    def rows(self) -> Sequence[Row]:
        """Parity, the pattern that failed once, and speed."""
        one = self.row.one
        return (
            one("parity", lambda case: judge_cases(case, _PARITY, "v2 parity", _is_parity)),
            one("gaps", lambda case: judge_cases(case, _PARITY, "the pattern gaps", _is_gaps)),
            one("faster", _faster),
        )


def _is_parity(test: JUnitCase) -> bool:
    return test.name.startswith(_PATTERNS)


def _is_gaps(test: JUnitCase) -> bool:
    return _is_parity(test) and "gaps" in test.name


def _is_speed(test: JUnitCase) -> bool:
    return test.name.startswith(_FASTER)


def _with_ratio(case: Case, finding: Finding) -> Finding:
    """The finding with the ratio's lower bound of the worst shape, as the tests recorded it."""
    tests = [test for test in report_of(case, _SPEED).cases if _is_speed(test)]
    bounds = [float(test.properties[_BOUND]) for test in tests if _BOUND in test.properties]
    devices = {test.properties["device"] for test in tests if "device" in test.properties}
    if not bounds or finding.measurement is None:
        return finding
    value = derived(
        finding.measurement,
        name=_BOUND,
        value=min(bounds),
        unit="ratio",
        n=len(bounds),
        note=f"lowest of {len(bounds)} shapes on {', '.join(sorted(devices)) or 'this machine'}",
    )
    return replace(finding, measurement=value, limit=_NOT_SLOWER)


def _faster(case: Case) -> Finding:
    """The slowest shape decides; on a machine with GPUs only times from the GPU count."""
    finding = _with_ratio(case, judge_cases(case, _SPEED, "v2 speed", _is_speed))
    if not case.profile.throughput_gated and finding.outcome is Outcome.FAIL:
        reason = f"{finding.reason}; times are not gated on profile {case.profile.name}"
        return skipped(Reason.NOT_GATED, reason, measurement=finding.measurement)
    return finding
