"""Baseline: throughput, compression, GPUs, MFU."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest

from runbook.records import Check, Outcome, Reason, Verdict, judge_run
from runbook.records.evidence import LaunchEvidence, PhaseEvidence
from tests.phases import answers, builder, heartbeats, machine_files, spoil, traces
from tests.phases.answers import (
    FINE,
    IMPOSSIBLE,
    NO_EFFECT,
    NOT_ASKED_FOR,
    NOT_GATED,
    NOTHING,
    TOO_FEW,
    TOO_LITTLE,
    UNDECIDED,
    WARNED,
    WHERE,
    says,
)


def run(what: str, *rates: float, where: Any = WHERE) -> Check:
    """The row; the launches have these rates in turn."""
    planned = [one for one in builder.PHASES["baseline"].plan(where) if not one.conditional]
    launches = {
        launch.name: traces.healthy(launch, where.profile, rate=rate)
        for launch, rate in zip(planned, cycle(rates), strict=False)
    }
    return builder.row("baseline", what, PhaseEvidence(launches=launches), where)


def test_throughput_clearly_below_the_floor_fails_with_the_playbooks_advice() -> None:
    says(run("throughput", 23.0, 23.2, 22.8), TOO_LITTLE, remedy="NSA_DDP_BUCKET_MB=50")


# Row, what the launches reach in turn (tok/s), the profile, and what the row says.
RATES: list[tuple[str, tuple[float, ...], str, tuple[Outcome, Reason], str]] = [
    ("throughput", (50.0, 50.5, 49.5), "a100x2_pcie4", FINE, "last 50 steps"),
    ("throughput", (38.0, 40.0, 39.4), "a100x2_pcie4", UNDECIDED, ""),
    ("throughput", (37.0, 37.1, 36.9), "a100x2_pcie4", TOO_LITTLE, ""),
    ("throughput", (37.0, 37.1, 36.9), "a100x2_pcie3", FINE, ""),
    ("throughput_aim", (42.0,), "a100x2_pcie4", NOT_GATED, "is below the aim of 45-55"),
    ("throughput_aim", (50.0,), "a100x2_pcie4", NOT_GATED, "is inside the aim of 45-55"),
    ("throughput_aim", (847.0,), "a100x2_pcie4", NOT_GATED, "is above the aim of 45-55"),
    ("target_fresh", (847.0,), "a100x2_pcie4", WARNED, "STALE TARGET"),
    ("target_fresh", (60.0,), "a100x2_pcie4", FINE, ""),
    # 5e8 FLOPs per token on two cards of 312 TFLOP/s: 1.248e6 tok/s are the whole peak.
    ("mfu", (5e5,), "a100x2_pcie4", FINE, ""),
    # 4.8 %: 1,500 times the floor of B3, and still no healthy pair of A100.
    ("mfu", (6e4,), "a100x2_pcie4", TOO_LITTLE, ""),
    ("throughput", (6e4,), "a100x2_pcie4", FINE, ""),
    ("mfu", (1.2e4,), "a100x2_pcie4", IMPOSSIBLE, "under 1%"),
    ("mfu", (39.0,), "a100x2_pcie4", IMPOSSIBLE, "under 1%"),
    ("mfu", (2e6,), "a100x2_pcie4", IMPOSSIBLE, "is not in (0, 1]"),
    ("mfu", (5.0,), "cpu", NOT_GATED, ""),
]


@pytest.mark.parametrize(("what", "rates", "profile", "wanted", "text"), RATES)
def test_what_a_rate_makes_of_a_row(
    what: str, rates: tuple[float, ...], profile: str, wanted: tuple[Outcome, Reason], text: str
) -> None:
    says(run(what, *rates, where=builder.context(profile)), wanted, text)


def test_one_long_launch_cannot_decide_near_the_floor() -> None:
    where = builder.context(protocol="single")
    for rate, outcome in ((40.0, Outcome.INCONCLUSIVE), (80.0, Outcome.PASS), (20.0, Outcome.FAIL)):
        assert run("throughput", rate, where=where).outcome is outcome


def test_throughput_of_a_friendlier_or_impossible_run_does_not_count() -> None:
    for change, code in (
        (spoil.effective(seq_len=128), Reason.MISMATCH),
        (spoil.columns(loss=2.9), Reason.NOT_PLAUSIBLE),
    ):
        check = answers.row("baseline", "throughput", change, only=["run2"], rate=847.0)
        assert (check.outcome, check.code) == (Outcome.INVALID, code)
        assert check.reason.startswith("these launches do not count: run2: ")


@pytest.mark.parametrize("what", ["mfu", "gpu_utilisation"])
def test_one_gpu_that_idles_is_told_about_its_host_and_not_about_links(what: str) -> None:
    alone = builder.context("h100x1")
    limit = {"mfu": "mfu_floor", "gpu_utilisation": "gpu_utilisation"}[what]
    high = alone.profile.limits[limit].model_copy(update={"value": 99.9})
    profile = alone.profile.model_copy(update={"limits": {**alone.profile.limits, limit: high}})
    where = replace(alone, profile=profile)
    check = answers.row("baseline", what, where=where)
    says(check, TOO_LITTLE, remedy="waits for the host")
    assert "NSA_DDP" not in check.remedy and "PCIe" not in check.remedy


def test_days_and_cost_of_the_production_run() -> None:
    # 50,000 steps of 8,192 tokens at 1e5 tok/s: 4096 s.
    check = run("production_time", 1e5, 1e5, 1e5)
    assert check.measurement.value == pytest.approx(4096 / 86400)
    assert "cost" not in check.reason
    paid = run("production_time", 1e3, 1e3, 1e3, where=builder.context(gpu_hour_price=2.0))
    # 113.78 hours on two GPUs at 2 per hour.
    assert "cost 455 at 2 per GPU hour" in paid.reason


def test_compression_needs_the_proof_and_the_line() -> None:
    for change in (
        spoil.without_effect("NSA_DDP_COMPRESS"),
        spoil.parts(console_lines=("[ddp] gradient compression enabled: fp16",)),
    ):
        check = answers.row("baseline", "compression", change)
        says(check, NO_EFFECT, remedy="NSA_DDP_COMPRESS=bf16")


def test_compression_that_was_switched_off_is_skipped() -> None:
    where = builder.context(toggles={"NSA_DDP_COMPRESS": "off"})
    says(answers.row("baseline", "compression", where=where), NOT_ASKED_FOR)


def test_of_several_launches_the_number_nearest_to_its_limit_is_shown_with_the_limit() -> None:
    def fuller(made: LaunchEvidence) -> LaunchEvidence:
        used = 40_960.0 if made.launch.name == "run2" else 8_192.0
        return replace(made, gpu_samples=machine_files.gpu_samples(2, used_mib=used))

    check = answers.row("baseline", "memory_headroom", fuller)
    assert check.outcome is Outcome.PASS and check.measurement is not None
    assert (check.measurement.value, check.comparator.value, check.limit) == (50.0, ">", 20.0)
    assert check.reason.startswith("5 launches: run2:") and check.limit_source


def test_one_idle_gpu_is_unbalanced_and_not_busy() -> None:
    samples = machine_files.gpu_samples(2)
    samples.loc[samples["index"] == 1, "utilization_percent"] = 30.0
    found = builder.evidence("baseline", WHERE, change=spoil.parts(gpu_samples=samples))
    assert builder.row("baseline", "gpu_balance", found, WHERE).outcome is Outcome.FAIL
    busy = builder.row("baseline", "gpu_utilisation", found, WHERE)
    assert busy.outcome is Outcome.FAIL and "least busy is GPU 1" in busy.reason


def test_starting_up_and_other_cards_do_not_count() -> None:
    """11 s of start are idle, and so are the six cards that no rank uses."""
    samples = machine_files.gpu_samples(8)
    samples.loc[samples["index"] > 1, "utilization_percent"] = 0.0
    samples.loc[samples["index"] > 1, "memory_used_mib"] = 81_000.0
    found = builder.evidence("baseline", WHERE, change=spoil.parts(gpu_samples=samples))
    for what in ("gpu_utilisation", "gpu_balance", "memory_headroom"):
        check = builder.row("baseline", what, found, WHERE)
        assert check.outcome is Outcome.PASS, check.reason
    check = builder.row("baseline", "gpu_utilisation", found, WHERE)
    assert check.measurement is not None and check.measurement.value == 95.0
    assert len(check.measurement.sources) == 5, "samples of all five launches"


def test_samples_that_end_before_the_timed_steps_are_missing() -> None:
    """A sampler that died in one of five launches: those that it left were busy, and passed."""
    samples = machine_files.gpu_samples(2)
    check = answers.row(
        "baseline",
        "gpu_utilisation",
        spoil.parts(gpu_samples=samples.head(len(samples) * 6 // 10)),
        only=["run3"],
    )
    says(check, NOTHING, "run3: no samples in the last ")


@pytest.mark.parametrize("kept", [slice(30), slice(-5, None)], ids=["first", "last"])
def test_samples_are_dated_by_the_heartbeats_of_the_timed_steps(kept: slice) -> None:
    def change(made: LaunchEvidence) -> LaunchEvidence:
        return spoil.rank(0, steps=made.ranks[0].steps.iloc[kept])(made)

    check = answers.row("baseline", "gpu_utilisation", change)
    says(check, NOTHING, "its heartbeats lack the steps that the throughput rests on")


def test_too_few_samples_neither_pass_nor_fail() -> None:
    """100 steps in 0.2 s. It was a warning, and so a GO of GPUs that nobody had looked at."""
    found = builder.evidence("baseline", WHERE, rate=4e6)
    for what in ("gpu_utilisation", "gpu_balance"):
        check = builder.row("baseline", what, found, WHERE)
        says(check, TOO_FEW, "too few to tell", remedy="--steps-scale")
    check = builder.row("baseline", "gpu_utilisation", found, WHERE)
    assert judge_run([check], [check.id]) is Verdict.INCOMPLETE


ONE, TWO, EIGHT = map(machine_files.gpu_samples, (1, 2, 8))
OF_SAMPLES = ("gpu_utilisation", "gpu_balance", "memory_headroom")


@pytest.mark.parametrize(
    ("samples", "rows", "outcome"),
    [
        (None, OF_SAMPLES, Outcome.INCOMPLETE),
        (ONE, OF_SAMPLES, Outcome.INCOMPLETE),
        (TWO.assign(utilization_percent=math.nan), OF_SAMPLES[:2], Outcome.INCOMPLETE),
        (TWO.assign(memory_used_mib=math.nan), OF_SAMPLES[2:], Outcome.INCOMPLETE),
        # Without UUIDs only samples of as many GPUs count.
        (TWO.drop(columns="uuid"), OF_SAMPLES, Outcome.PASS),
        (EIGHT.drop(columns="uuid"), OF_SAMPLES, Outcome.INCOMPLETE),
    ],
    ids=["none", "of one", "without use", "without memory", "no UUIDs", "eight without UUIDs"],
)
def test_samples_that_do_not_tell_of_both_gpus_are_missing_and_no_fault(
    samples: Any, rows: tuple[str, ...], outcome: Outcome
) -> None:
    found = builder.evidence("baseline", WHERE, change=spoil.parts(gpu_samples=samples))
    for what in rows:
        assert builder.row("baseline", what, found, WHERE).outcome is outcome


def test_without_config_digests_nothing_is_comparable() -> None:
    check = answers.row("baseline", "comparable", spoil.env(config_sha256=None))
    assert check.outcome is Outcome.INVALID


def test_the_table_shows_the_documented_statistic_beside_ours() -> None:
    judgement = builder.judge("baseline", builder.evidence("baseline", WHERE, rate=50.0), WHERE)
    (table,) = judgement.tables
    assert [row[0] for row in table.rows] == [f"run{number}" for number in range(1, 6)]
    assert table.rows[0][1:5] == (50.0, 0.0, "steps 11-60", 50.0)
    assert len(judgement.measurements) == 5


def test_a_mean_of_launches_names_every_file_it_rests_on() -> None:
    check = run("throughput", 50.0, 50.5, 49.5)
    assert (check.limit, check.comparator.value, check.limit_source) == (39, ">=", "requirement B3")
    assert (check.measurement.n, check.measurement.unit) == (5, "tok/s")
    assert check.measurement.value == pytest.approx(50.0, rel=1e-2)
    numbers = range(1, 6)
    paths = [source.path for source in check.measurement.sources]
    assert paths == [f"baseline/run{number}/training.csv" for number in numbers]
    assert set(paths) <= set(check.evidence)
    assert f"{paths[0]} and {len(paths) - 1} more" in str(check.measurement)
    assert [source.sha256 for source in check.measurement.sources] == [
        heartbeats.digest_of(f"baseline/run{number}") for number in numbers
    ]
