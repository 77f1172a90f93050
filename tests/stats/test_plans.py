"""The plan whose rates are published is the object that the phases follow."""

from __future__ import annotations

import inspect
from typing import Any

import decision_cells
import pytest

import runbook.stats
from runbook.config import load_profile
from runbook.stats import plans
from runbook.tools import decide
from tests.phases import builder


@pytest.mark.parametrize("name", ["BUCKET_PLAN", "FUSED_PLAN", "SCALING_PLAN"])
def test_benchmark_and_command_use_the_published_plan(name: str) -> None:
    assert getattr(decision_cells, name) is getattr(plans, name)
    assert getattr(decide, name) is getattr(plans, name)


@pytest.mark.parametrize(
    ("phase", "check", "function", "plan"),
    [
        ("bucket_sweep", "best", "best_arm_sequential", plans.BUCKET_PLAN),
        ("fused_adamw", "keep", "non_inferiority", plans.FUSED_PLAN),
        ("single_gpu", "scaling", "scaling", plans.SCALING_PLAN),
    ],
)
def test_a_phase_follows_the_published_plan(
    monkeypatch: pytest.MonkeyPatch, phase: str, check: str, function: str, plan: object
) -> None:
    """The power of five pairs was published, the phase decided on three without a plan."""
    real = getattr(runbook.stats, function)
    default = inspect.signature(real).parameters["plan"].default
    followed = []

    def recorded(*values: Any, **options: Any) -> Any:
        followed.append(options.get("plan", default))
        return real(*values, **options)

    monkeypatch.setattr(runbook.stats, function, recorded)
    where = builder.context()
    before = {"baseline": builder.evidence("baseline", where)}
    builder.row(phase, check, builder.evidence(phase, where, earlier=before), where)
    assert followed and all(one is plan for one in followed)


@pytest.mark.parametrize("name", ["a100x2_pcie4", "a100x2_pcie3"])
def test_the_published_rates_are_those_of_the_pairs_that_are_launched(name: str) -> None:
    phases = load_profile(name).phases
    assert phases["single_gpu"].launches == decision_cells.LAUNCHED_PAIRS
    assert phases["baseline"].launches == decision_cells.LAUNCHED_PAIRS
