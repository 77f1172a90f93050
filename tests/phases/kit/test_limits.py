"""Every declared limit decides when it is passed, and never where a profile only shows it.

The evidence is healthy throughout; the limit is moved to where the healthy number is beyond it. A
limit that nothing reads, or that something compares by itself, is found by that.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from runbook.config import Limit, LimitSpec, LimitUse, registry
from runbook.config.load import load_profile_document
from runbook.config.registry import PlanContext
from runbook.records import Check, Comparator, Outcome
from runbook.records.evidence import PhaseEvidence, TrainingLog
from tests.phases import builder, spoil

PHASES = registry.phases()
LIMITS = registry.known_limits(PHASES)
GATES = [spec for spec in LIMITS.values() if spec.use is LimitUse.GATE and not spec.toggle]
OPEN = (Outcome.FAIL, Outcome.INVALID, Outcome.INCONCLUSIVE)
# What a decision refuses as a parameter is not what is asked here.
_TIGHT = {"drift": 1e-9, "stall_share": 1e-9, "memory_gib": 1e-9, "scaling": 1.04}
# Judged, and in no shipped profile's `required`: balance is asked for without a number (B10), and
# the loader's phase is optional.
NOT_REQUIRED = {"gpu_imbalance", "loader_fetch_s"}
_READERS = {
    spec.name: tuple(name for name, phase in PHASES.items() if spec in phase.limits)
    for spec in LIMITS.values()
}


def with_a_pause(log: TrainingLog) -> TrainingLog:
    """Jitter, and one step of three times the usual length: healthy, but not without any stall."""
    noisy = spoil.jittered(log, 0.01)
    changed = noisy.frame.copy()
    changed.loc[700, "dt_s"] *= 3.0
    changed["toks_per_s"] = changed["tokens"] / changed["dt_s"]
    return replace(noisy, frame=changed)


def judged(spec: LimitSpec, where: PlanContext) -> list[Check]:
    """The checks of the phases that read the limit, on healthy evidence."""
    done: dict[str, PhaseEvidence] = {}
    checks: list[Check] = []
    wanted = {*_READERS[spec.name]}
    for name in reversed(PHASES):
        wanted |= set(PHASES[name].reads) if name in wanted else set()
    for name in (name for name in PHASES if name in wanted):
        earlier = {before: done[before] for before in PHASES[name].reads}
        rate = 5.2e4 if name == "single_gpu" else 1e5
        found = builder.evidence(name, where, earlier=earlier, rate=rate)
        launches = dict(found.launches)
        if name == "long_run":
            launches["run"] = spoil.at("training", with_a_pause)(launches["run"])
        before = builder.accepted(found, [rate] * 6) if name == "baseline" else None
        done[name] = replace(found, launches=launches, accepted=before)
        if name in _READERS[spec.name]:
            checks += builder.judge(name, done[name], where).checks
    return checks


def beyond(spec: LimitSpec) -> float:
    """A value of the limit that no healthy number keeps to."""
    upward = spec.comparator in (Comparator.AT_LEAST, Comparator.ABOVE)
    return _TIGHT.get(spec.name, 1e30 if upward else -1.0)


def moved(spec: LimitSpec, *, gated: bool) -> PlanContext:
    base = builder.context("a100x2_pcie4")
    document: dict[str, Any] = base.profile.model_dump(mode="json")
    document["limits"][spec.name] |= {"value": beyond(spec), "gated": gated}
    return replace(base, profile=load_profile_document(document))


@cache
def healthy(name: str) -> dict[str, Outcome]:
    """The rows that read the limit, and their outcomes before it is moved."""
    where = builder.context("a100x2_pcie4")
    return {check.id: check.outcome for check in judged(LIMITS[name], where)}


def worse(spec: LimitSpec, *, gated: bool) -> list[str]:
    """The rows that are open only because the limit was moved."""
    before = healthy(spec.name)
    return [
        f"{check.id}: {check.reason}"
        for check in judged(spec, moved(spec, gated=gated))
        if check.outcome in OPEN and before[check.id] not in OPEN
    ]


@pytest.mark.parametrize("spec", GATES, ids=lambda spec: spec.name)
def test_beyond_it_a_row_does_not_pass(spec: LimitSpec) -> None:
    rows = worse(spec, gated=True)
    assert rows, f"no row notices that {spec.name} is passed"
    required = set(builder.context("a100x2_pcie4").profile.required)
    decides = any(row.partition(":")[0] in required for row in rows)
    assert decides is (spec.name not in NOT_REQUIRED), "a row decides nothing until it is required"


@pytest.mark.parametrize("spec", GATES, ids=lambda spec: spec.name)
def test_shown_only_it_never_decides(spec: LimitSpec) -> None:
    assert not worse(spec, gated=False)


@pytest.mark.parametrize("sign", [">=", ">", "<=", "<"])
def test_one_comparison(sign: str) -> None:
    spec = LimitSpec(name="x", unit="", comparator=Comparator(sign), meaning="")
    limit = Limit(spec=spec, value=1.0, source="x", gated=True)
    expected = {">=": (False, True, True), ">": (False, False, True)}
    expected |= {"<=": (True, True, False), "<": (True, False, False)}
    assert tuple(limit.holds(value) for value in (0.5, 1.0, 1.5)) == expected[sign]
    assert not limit.holds(float("nan"))
    with pytest.raises(ValueError, match="compares no numbers"):
        LimitSpec(name="x", unit="", comparator=Comparator.EQUALS, meaning="")
