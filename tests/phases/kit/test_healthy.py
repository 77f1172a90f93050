"""A healthy run of each shipped profile is a GO, and of nothing less."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import pytest

from phases.kit.case import Case
from phases.kit.finding import Finding
from runbook.config.registry import select
from runbook.records import Check, LaunchStatus, Outcome, Series, Verdict, judge_run, satisfies
from runbook.records.evidence import PhaseEvidence
from tests.phases import builder, spoil
from tests.phases.answers import WHERE, says
from tests.said import hold
from tests.tiers import by_tier

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
    if name in ("cpu", "a100x2_pcie4"):
        for check in checks:
            hold(check)


def test_each_required_check_alone_decides() -> None:
    where = builder.context("cpu")
    checks = whole_run("cpu")
    for lost in where.profile.required:
        rest = [check for check in checks if check.id != lost]
        assert judge_run(rest, where.profile.required) is Verdict.INCOMPLETE


# What phases keep for the pictures: the curves of their launches, with their limits.


def test_the_curves_of_the_long_run_have_their_windows_and_their_limits() -> None:
    found = builder.evidence("long_run", WHERE)
    judgement, launches = builder.judge("long_run", found, WHERE), found.launches
    kept: dict[str, list[Series]] = {}
    for curve in judgement.series:
        kept.setdefault(curve.group, []).append(curve)
    assert sorted(curve.label for curve in kept["throughput"]) == sorted(launches)
    for curve in kept["throughput"]:
        of_it = [one for one in judgement.measurements if one.path == curve.path]
        (last,) = (one.window for one in of_it if one.name == "toks_per_s_last50")
        assert (curve.window, curve.warmup.first_step) == (last, 1)
        frame = launches[curve.label].training.frame
        held = dict(zip(frame["step"], frame["toks_per_s"], strict=True))
        assert [y for _, y in curve.points] == pytest.approx([held[x] for x, _ in curve.points])
    effective = (launches["run"].env or {})["effective"]
    start, floor = math.log(effective["vocab_size"]), effective["loss_floor"]
    levels = [mark.value for mark in kept["loss"][0].limits]
    assert levels == pytest.approx([start - 0.1 * (start - floor), start, floor])
    for curve, rank in zip(kept["memory"], launches["run"].ranks, strict=True):
        peak = np.nanmax(rank.steps["reserved_mib"]) / 1024
        assert max(y for _, y in curve.points) == pytest.approx(peak, rel=1e-5)
        assert curve.unit == "GiB" and [mark.value for mark in curve.limits] == [60]
    assert [mark.value for curve in kept["gates"] for mark in curve.limits] == [0.2, 0.9]


# What a row says of a launch that was not run, was refused, or left nothing to read.


@pytest.mark.parametrize(
    ("cause", "wanted", "reason"),
    [
        ("run1 was refused: no CUDA device 0", "INVALID wrong_environment", "no CUDA device 0"),
        ("the run was interrupted", "INCOMPLETE not_run", "not run: the run was interrupted"),
    ],
)
def test_a_launch_not_run_for_a_refused_one_has_its_cause(
    cause: str, wanted: Any, reason: str
) -> None:
    """run1 was refused by the machine, run2 was not run; for another reason it has its own."""
    refused = spoil.ended(LaunchStatus.ENVIRONMENT_ERROR, cause="no CUDA device 0")
    change = spoil.both(
        spoil.of_launch("run1", refused),
        spoil.of_launch("run2", spoil.ended(LaunchStatus.NOT_RUN, cause=cause)),
    )
    evidence = builder.evidence("baseline", builder.context(), change=change)
    with pytest.raises(Finding) as stopped:
        Case(phase="baseline", evidence=evidence, context=builder.context()).launch("run2")
    says(stopped.value, wanted, reason)
