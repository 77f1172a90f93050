"""Parity, NVTX, single GPU, long run, FineWeb: each made to say each thing that it can say."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runbook import registry
from runbook.records import Check, LaunchStatus, Outcome, Reason
from runbook.records.evidence import JUnitCase, JUnitReport, LaunchEvidence, PhaseEvidence
from tests.phases import builder

PHASES = registry.phases()

WHERE = builder.context()
NOTHING = (Outcome.INCOMPLETE, Reason.MISSING_ARTIFACT)
TOO_MUCH = (Outcome.FAIL, Reason.ABOVE_LIMIT)
few = settings(max_examples=25, deadline=None)


def said(check: Check) -> tuple[Outcome, Reason]:
    return check.outcome, check.code


def row(phase: str, what: str, change: builder.Change | None = None, where: Any = WHERE) -> Check:
    return builder.row(phase, what, builder.evidence(phase, where, change=change), where)


# v2 parity


def with_status(status: str, message: str = "", *, only: str = "") -> builder.Change:
    def change(made: LaunchEvidence) -> LaunchEvidence:
        assert made.junit is not None
        cases = tuple(
            replace(case, status=status, message=message) if only in case.name else case
            for case in made.junit.cases
        )
        return replace(made, junit=replace(made.junit, cases=cases))

    return change


def collected(*names: str) -> builder.Change:
    cases = tuple(JUnitCase(name=name, classname="nsa.tests.x", status="passed") for name in names)
    report = JUnitReport(path="v2_parity/parity/junit.xml", sha256=builder.SHA, cases=cases)
    return builder.parts(junit=report)


@pytest.mark.parametrize("what", ["parity", "gaps", "faster"])
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (None, (Outcome.PASS, Reason.OK)),
        (with_status("failed", "indices differ"), (Outcome.FAIL, Reason.TEST_FAILED)),
        (with_status("error", "no fixture"), (Outcome.FAIL, Reason.TEST_FAILED)),
        (with_status("skipped", "needs CUDA"), (Outcome.SKIPPED, Reason.NEEDS_CUDA)),
        (collected(), (Outcome.INCOMPLETE, Reason.NOTHING_COLLECTED)),
        (collected("test_something_else"), (Outcome.INCOMPLETE, Reason.NOTHING_COLLECTED)),
        (builder.parts(junit=None), NOTHING),
    ],
)
def test_only_tests_that_ran_and_passed_pass(
    what: str, change: builder.Change | None, expected: tuple[Outcome, Reason]
) -> None:
    assert said(row("v2_parity", what, change)) == expected


def test_the_pattern_gaps_has_its_own_row() -> None:
    broken = with_status("failed", "blocks 3 and 9", only="gaps")
    for what in ("gaps", "parity"):
        check = row("v2_parity", what, broken)
        assert check.outcome is Outcome.FAIL and "blocks 3 and 9" in check.reason
        assert "NSA_SEL_RANGES_V2=0" in check.remedy
    only_others = collected("test_equivalence_various_patterns[random]")
    assert row("v2_parity", "gaps", only_others).code is Reason.NOTHING_COLLECTED


def test_a_slow_v2_on_a_shared_cpu_is_shown_and_not_gated() -> None:
    slower = with_status("failed", "ratio 0.9")
    check = row("v2_parity", "faster", slower, builder.context("cpu"))
    assert said(check) == (Outcome.SKIPPED, Reason.NOT_GATED)


def test_a_test_run_that_hung_is_told_by_its_rows() -> None:
    def hung(made: LaunchEvidence) -> LaunchEvidence:
        return replace(builder.ended(LaunchStatus.TIMED_OUT)(made), junit=None)

    assert said(row("v2_parity", "parity", hung)) == (Outcome.INCOMPLETE, Reason.TIMEOUT)


def raced(device: str, *bounds: float) -> builder.Change:
    """Speed tests that recorded these lower bounds; the test itself fails at 1 or less."""
    cases = tuple(
        JUnitCase(
            name=f"test_v2_performance_improvement[{number}]",
            classname="nsa.tests.test_performance_guards",
            status="passed" if bound > 1.0 else "failed",
            properties={"v1_over_v2_ratio_lower_99": str(bound), "device": device},
        )
        for number, bound in enumerate(bounds)
    )
    return builder.parts(junit=JUnitReport(path="speed/junit.xml", sha256=builder.SHA, cases=cases))


def test_the_slowest_shape_is_the_number_that_speed_is_judged_by() -> None:
    check = row("v2_parity", "faster", raced("cuda:0", 5.0, 1.7, 9.0))
    assert check.measurement is not None and check.measurement.value == 1.7
    assert (check.outcome, check.comparator.value, check.limit) == (Outcome.PASS, ">", 1.0)
    slow = row("v2_parity", "faster", raced("cuda:0", 5.0, 0.9))
    assert slow.outcome is Outcome.FAIL and slow.measurement is not None
    assert slow.measurement.value == 0.9


def test_times_of_the_cpu_say_nothing_about_a_gpu() -> None:
    check = row("v2_parity", "faster", raced("cpu", 5.0, 9.0))
    assert said(check) == (Outcome.INVALID, Reason.WRONG_ENVIRONMENT)


# NVTX


def profiled(**values: Any) -> builder.Change:
    def change(made: LaunchEvidence) -> LaunchEvidence:
        return replace(made, profile={**(made.profile or {}), **values})

    return change


V1 = {"ranges": {"nsa.sel.ranges_v1": {"count": 9}}}


@pytest.mark.parametrize(
    ("what", "change", "expected"),
    [
        ("range_present", profiled(**V1), (Outcome.FAIL, Reason.MISMATCH)),
        ("range_present", profiled(ranges={}), (Outcome.INVALID, Reason.NO_EFFECT)),
        (
            "range_present",
            builder.without_effect("NSA_NVTX"),
            (Outcome.INVALID, Reason.NO_EFFECT),
        ),
        (
            "range_present",
            builder.parts(profile=None),
            NOTHING,
        ),
        ("trace_kept", builder.parts(trace_path=""), NOTHING),
        ("python_share", profiled(python_share=0.6), TOO_MUCH),
        ("python_share", profiled(python_share=1.2), (Outcome.INVALID, Reason.NOT_PLAUSIBLE)),
        (
            "python_share",
            profiled(python_share=None),
            NOTHING,
        ),
        (
            "python_hotspot",
            profiled(top_python=[{"name": "loop", "share": 0.5}]),
            TOO_MUCH,
        ),
        ("python_hotspot", profiled(top_python=[]), NOTHING),
    ],
)
def test_nvtx_rows(what: str, change: builder.Change, expected: tuple[Outcome, Reason]) -> None:
    assert row("nvtx", what).outcome is Outcome.PASS
    assert said(row("nvtx", what, change)) == expected


def test_the_hotspot_is_named() -> None:
    top = [{"name": "a", "share": 0.01}, {"name": "sequential_prefill", "share": 0.4}]
    check = row("nvtx", "python_hotspot", profiled(top_python=top))
    assert "sequential_prefill: 40%" in check.reason and "NSA_PREFILL_BATCHED=1" in check.remedy


@few
@given(st.floats(0.0, 1.0))
def test_pythons_share_may_be_a_quarter(share: float) -> None:
    check = row("nvtx", "python_share", profiled(python_share=share))
    assert (check.outcome is Outcome.PASS) == (share <= 0.25)


# Single GPU


def scaled(
    one: float, many: float, *, where: Any = WHERE, change: builder.Change | None = None
) -> Check:
    """E = many / (2 * one), with one percent between launches."""
    wobble = (0.995, 1.0, 1.005)
    before = {
        launch.name: builder.healthy(launch, where.profile, rate=many * factor)
        for launch, factor in zip(PHASES["baseline"].plan(where), wobble, strict=True)
    }
    alone = {}
    for launch, factor in zip(PHASES["single_gpu"].plan(where), wobble, strict=True):
        made = builder.healthy(launch, where.profile, rate=one * factor)
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
        # The seeds' 847 on two against 334 on one: not possible.
        (334.0, 847.0, (Outcome.INVALID, Reason.NOT_PLAUSIBLE)),
    ],
)
def test_scaling(one: float, many: float, expected: tuple[Outcome, Reason]) -> None:
    check = scaled(one, many)
    assert said(check) == expected, check.reason
    assert check.measurement is not None
    assert check.measurement.value == pytest.approx(many / one / 2, rel=1e-3)


def test_scaling_of_unlike_runs_is_not_comparable() -> None:
    check = scaled(1e5, 1.96e5, change=builder.effective(gradient_checkpointing=True))
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


# Long run


def drifting(made: LaunchEvidence) -> LaunchEvidence:
    assert made.training is not None
    rise = np.linspace(1.0, 1.3, len(made.training.frame))
    table = made.training.frame.copy()
    table["dt_s"] *= rise
    table["toks_per_s"] /= rise
    return replace(made, training=replace(made.training, frame=table))


def pausing(made: LaunchEvidence) -> LaunchEvidence:
    assert made.training is not None
    slow = np.where(np.arange(len(made.training.frame)) % 50 == 49, 5.0, 1.0)
    table = made.training.frame.copy()
    table["dt_s"] *= slow
    table["toks_per_s"] /= slow
    return replace(made, training=replace(made.training, frame=table))


def rough(made: LaunchEvidence) -> LaunchEvidence:
    assert made.training is not None
    return replace(made, training=builder.jittered(made.training, 0.25))


leaking = builder.columns(mem_mib=lambda table: 30_000.0 + 1.0 * table["step"])


def gates(**health: float) -> builder.Change:
    return builder.parts(gates=builder.gates(1200, **health))


COLLAPSED = (Outcome.FAIL, Reason.BELOW_LIMIT)


@pytest.mark.parametrize(
    ("what", "change", "expected"),
    [
        ("no_halt", builder.parts(halted=True), (Outcome.FAIL, Reason.HALTED)),
        ("no_halt", builder.rank(1, halt_reason="gates"), (Outcome.FAIL, Reason.HALTED)),
        ("steady", drifting, (Outcome.FAIL, Reason.BELOW_LIMIT)),
        ("steady", pausing, (Outcome.FAIL, Reason.BELOW_LIMIT)),
        ("steady", rough, (Outcome.INCONCLUSIVE, Reason.UNDECIDED)),
        (
            "gates",
            builder.parts(gates=builder.gates(1200, entropy=0.1)),
            (Outcome.FAIL, Reason.BELOW_LIMIT),
        ),
        (
            "gates",
            builder.parts(gates=builder.gates(1200, max_gate=0.95)),
            (Outcome.FAIL, Reason.BELOW_LIMIT),
        ),
        (
            "gates",
            builder.parts(gates=builder.gates(1200, entropy=math.nan)),
            (Outcome.FAIL, Reason.BELOW_LIMIT),
        ),
        ("gates", builder.parts(gates=None), NOTHING),
        ("memory_plateau", leaking, (Outcome.FAIL, Reason.LEAK)),
        (
            "memory_plateau",
            builder.columns(mem_mib=math.nan),
            NOTHING,
        ),
        (
            "memory_limit",
            builder.rank(1, peak_cuda_mib=70_000.0),
            TOO_MUCH,
        ),
        (
            "memory_limit",
            builder.rank(1, peak_cuda_mib=None),
            NOTHING,
        ),
    ],
)
def test_long_run_rows(what: str, change: builder.Change, expected: tuple[Outcome, Reason]) -> None:
    assert row("long_run", what).outcome is Outcome.PASS
    check = row("long_run", what, change)
    assert said(check) == expected, check.reason


def test_two_bad_gate_readings_are_no_collapse_and_three_are() -> None:
    for bad, outcome in ((2, Outcome.PASS), (3, Outcome.FAIL)):
        health = builder.gates(1200)
        health.loc[10 : 9 + bad, "entropy"] = 0.05
        check = row("long_run", "gates", builder.parts(gates=health))
        assert check.outcome is outcome, check.reason


def test_a_cpu_shows_its_steadiness_and_gates_its_memory() -> None:
    where = builder.context("cpu")
    assert row("long_run", "steady", drifting, where).code is Reason.NOT_GATED
    assert row("long_run", "memory_plateau", None, where).outcome is Outcome.PASS


def test_the_long_run_keeps_its_curves() -> None:
    judgement = builder.judge("long_run", builder.evidence("long_run", WHERE), WHERE)
    names = [curve.name for curve in judgement.series]
    assert names == ["run toks_per_s", "run loss", "run mem_mib", "run gate entropy"]
    assert judgement.series[2].limit == 60 * 1024


# FineWeb

NO_PACKAGE = builder.ended(
    LaunchStatus.CONFIG_ERROR, cause="dataset fineweb_edu needs the package datasets"
)
falling = builder.columns(loss=lambda table: 5.5 - 0.005 * table["step"])


def test_without_the_package_fineweb_is_skipped_with_its_name() -> None:
    found = builder.evidence("fineweb", WHERE, change=NO_PACKAGE)
    checks = builder.judge("fineweb", found, WHERE).checks
    assert {check.outcome for check in checks} == {Outcome.SKIPPED}
    assert all("datasets" in check.reason for check in checks)


@pytest.mark.parametrize(
    ("what", "change", "expected"),
    [
        ("progress", falling, (Outcome.PASS, Reason.OK)),
        ("progress", builder.columns(loss=5.5), (Outcome.FAIL, Reason.MISMATCH)),
        ("loader", None, (Outcome.PASS, Reason.OK)),
        ("loader", builder.columns(fetch_s=61.0), TOO_MUCH),
        ("loader", builder.ended(LaunchStatus.HUNG), (Outcome.FAIL, Reason.HANG)),
        (
            "loader",
            lambda made: replace(
                made, env={**(made.env or {}), "notes": ["SYNTHETIC DATA instead of fineweb_edu"]}
            ),
            (Outcome.INVALID, Reason.WRONG_ENVIRONMENT),
        ),
    ],
)
def test_fineweb_rows(
    what: str, change: builder.Change | None, expected: tuple[Outcome, Reason]
) -> None:
    check = row("fineweb", what, change)
    assert said(check) == expected, check.reason


# Everything at once


GARBAGE = st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -1.0, 1e30])
COLUMNS = ("loss", "toks_per_s", "tokens", "dt_s", "mem_mib", "fetch_s")


@settings(max_examples=40, deadline=None)
@given(
    phase=st.sampled_from(["baseline", "bucket_sweep", "fused_adamw", "single_gpu", "long_run"]),
    column=st.sampled_from(COLUMNS),
    value=GARBAGE,
    share=st.sampled_from([0.01, 1.0]),
    keep=st.integers(1, 400),
)
def test_no_number_in_a_csv_can_stop_a_judgement(
    phase: str, column: str, value: float, share: float, keep: int
) -> None:
    def spoil(made: LaunchEvidence) -> LaunchEvidence:
        assert made.training is not None
        table = made.training.frame.iloc[:keep].copy()
        table[column] = table[column].astype(float)
        table.iloc[: max(1, int(share * len(table))), table.columns.get_loc(column)] = value
        return replace(made, training=replace(made.training, frame=table))

    where = builder.context("cpu")
    found = builder.evidence(phase, where, change=spoil)
    judgement = builder.judge(phase, found, where)
    if keep < 60 and phase in ("baseline", "single_gpu"):
        checks = {check.id: check for check in judgement.checks}
        assert checks[f"{phase}.plausible"].outcome is not Outcome.PASS
