"""Single GPU: scaling against the baseline, and what makes the two not comparable."""

from __future__ import annotations

from typing import Any

import pytest

from runbook import registry
from runbook.records import Check, Outcome, Reason
from runbook.records.evidence import PhaseEvidence
from tests.phases import builder, spoil, traces
from tests.phases.answers import WHERE, row, said

PHASES = registry.phases()


def scaled(
    one: float, many: float, *, where: Any = WHERE, change: spoil.Change | None = None
) -> Check:
    """E = many / (2 * one), with one percent between launches."""
    wobble = (0.995, 1.0, 1.005)
    before = {
        launch.name: traces.healthy(launch, where.profile, rate=many * factor)
        for launch, factor in zip(PHASES["baseline"].plan(where), wobble, strict=True)
    }
    alone = {}
    for launch, factor in zip(PHASES["single_gpu"].plan(where), wobble, strict=True):
        made = traces.healthy(launch, where.profile, rate=one * factor)
        alone[launch.name] = change(made) if change else made
    earlier = {"baseline": PhaseEvidence(launches=before)}
    found = PhaseEvidence(launches=alone, earlier=earlier)
    return builder.row("single_gpu", "scaling", found, where)


@pytest.mark.parametrize(
    ("one", "many", "expected"),
    [
        (1e5, 1.96e5, (Outcome.PASS, Reason.OK)),
        (1e5, 1.2e5, (Outcome.FAIL, Reason.BELOW_LIMIT)),
        (1e5, 1.81e5, (Outcome.INCONCLUSIVE, Reason.UNDECIDED)),
        # Report v4's 847 on two against 334 on one: not possible.
        (334.0, 847.0, (Outcome.INVALID, Reason.NOT_PLAUSIBLE)),
    ],
)
def test_scaling(one: float, many: float, expected: tuple[Outcome, Reason]) -> None:
    check = scaled(one, many)
    assert said(check) == expected, check.reason
    assert check.measurement is not None
    assert check.measurement.value == pytest.approx(many / one / 2, rel=1e-3)


def test_scaling_of_unlike_runs_is_not_comparable() -> None:
    check = scaled(1e5, 1.96e5, change=spoil.effective(gradient_checkpointing=True))
    assert said(check) == (Outcome.INVALID, Reason.NOT_COMPARABLE)
    assert "gradient_checkpointing" in check.reason


def test_the_batch_per_rank_may_differ_because_the_global_one_is_fixed() -> None:
    found = scaled(1e5, 1.96e5)
    assert found.outcome is Outcome.PASS


def test_one_rank_scales_to_nothing_and_cpu_is_not_gated() -> None:
    assert said(scaled(1e5, 1e5, where=builder.context("h200x1"))) == (
        Outcome.SKIPPED,
        Reason.NEEDS_GPUS,
    )
    cpu = scaled(1e5, 0.8e5, where=builder.context("cpu"))
    assert said(cpu) == (Outcome.SKIPPED, Reason.NOT_GATED) and cpu.measurement is not None


def test_without_the_baseline_there_is_no_efficiency() -> None:
    check = row("single_gpu", "scaling")
    assert said(check) == (Outcome.INCOMPLETE, Reason.NOT_RUN)
    assert "baseline" in check.reason
