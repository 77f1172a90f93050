"""A healthy run of each shipped profile is a GO, and of nothing less."""

from __future__ import annotations

from functools import cache

import pytest

from runbook.config import registry
from runbook.config.registry import select
from runbook.records import Check, Outcome, Verdict, judge_run, satisfies
from runbook.records.evidence import PhaseEvidence
from tests.phases import builder
from tests.tiers import by_tier

PHASES = registry.phases()

# A kind of machine each: what differs between others is numbers.
PROFILES = ("cpu", "a100x1", "a100x2_pcie3", "a100x2_pcie4", "a100x4_pcie4", "a100x2_nvlink",
            "h100x8_nvlink", "h200x1", "b200x3_nvlink")  # fmt: skip
# Eight ranks take four times what three do.
BY_TIER = by_tier(PROFILES, fast="h100x8_nvlink".__ne__)


@cache
def whole_run(profile: str) -> tuple[Check, ...]:
    """All nine phases, healthy, each seeing the earlier ones that it reads."""
    where = builder.context(profile)
    done: dict[str, PhaseEvidence] = {}
    checks: list[Check] = []
    for phase in select("all"):
        earlier = {name: done[name] for name in phase.reads}
        # N ranks give just under N times what one gives.
        rate = 1.04e5 if phase.name == "single_gpu" else 1e5 * max(2, where.profile.ranks)
        found = builder.evidence(phase.name, where, earlier=earlier, rate=rate)
        done[phase.name] = found
        checks += builder.judge(phase.name, found, where).checks
    return tuple(checks)


@pytest.mark.parametrize("name", BY_TIER)
def test_a_healthy_run_is_go(name: str) -> None:
    checks = whole_run(name)
    wrong = [
        f"{check.id}: {check.outcome} {check.reason}"
        for check in checks
        if check.outcome not in (Outcome.PASS, Outcome.SKIPPED)
        or (check.required and not satisfies(check))
    ]
    assert not wrong
    assert judge_run(checks, builder.context(name).profile.required) is Verdict.GO


def test_each_required_check_alone_decides() -> None:
    where = builder.context("cpu")
    checks = whole_run("cpu")
    for lost in where.profile.required:
        rest = [check for check in checks if check.id != lost]
        assert judge_run(rest, where.profile.required) is Verdict.INCOMPLETE
