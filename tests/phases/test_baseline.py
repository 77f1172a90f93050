"""Baseline: throughput, compression, GPUs, MFU."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from typing import Any

import pandas as pd
import pytest

from runbook.records import Check, Outcome, Reason
from runbook.records.evidence import LaunchEvidence, PhaseEvidence
from tests.phases import answers, builder, heartbeats, machine_files, spoil, traces
from tests.phases.answers import (
    FINE,
    IMPOSSIBLE,
    NO_EFFECT,
    NOT_ASKED_FOR,
    NOT_GATED,
    NOTHING,
    OTHERWISE,
    TOO_FEW,
    TOO_LITTLE,
    UNDECIDED,
    WARNED,
    WHERE,
    case,
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


@pytest.mark.parametrize(("rate", "wanted"), [(40.0, UNDECIDED), (80.0, FINE), (20.0, TOO_LITTLE)])
def test_one_long_launch_cannot_decide_near_the_floor(rate: float, wanted: Any) -> None:
    says(run("throughput", rate, where=builder.context(protocol="single")), wanted)


@pytest.mark.parametrize(
    ("change", "wanted"),
    [(spoil.effective(seq_len=128), OTHERWISE), (spoil.columns(loss=2.9), IMPOSSIBLE)],
)
def test_throughput_of_a_friendlier_or_impossible_run_does_not_count(
    change: spoil.Change, wanted: Any
) -> None:
    check = answers.row("baseline", "throughput", change, only=["run2"], rate=847.0)
    says(check, wanted, "these launches do not count: run2: ")


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


FP16 = spoil.parts(console_lines=("[ddp] gradient compression enabled: fp16",))


@pytest.mark.parametrize("change", [spoil.without_effect("NSA_DDP_COMPRESS"), FP16])
def test_compression_needs_the_proof_and_the_line(change: spoil.Change) -> None:
    check = answers.row("baseline", "compression", change)
    says(check, NO_EFFECT, remedy="NSA_DDP_COMPRESS=bf16")


def test_compression_that_was_switched_off_is_skipped() -> None:
    where = builder.context(toggles={"NSA_DDP_COMPRESS": "off"})
    says(answers.row("baseline", "compression", where=where), NOT_ASKED_FOR)


def of_cards(which: Any, gpus: int = 2, **columns: float) -> pd.DataFrame:
    """Samples in which the cards of these numbers show something else."""
    samples = machine_files.gpu_samples(gpus)
    for name, value in columns.items():
        samples.loc[which(samples["index"]), name] = value
    return samples


ONE, TWO, EIGHT = map(machine_files.gpu_samples, (1, 2, 8))
IDLE = of_cards(lambda index: index == 1, utilization_percent=30.0)
# 11 s of start are idle, and so are the six cards that no rank uses.
OTHERS = of_cards(lambda index: index > 1, 8, utilization_percent=0.0, memory_used_mib=81_000.0)
ROWS = ("gpu_utilisation", "gpu_balance", "memory_headroom")
DIED = TWO.head(len(TWO) * 6 // 10)
TOO_UNEQUAL = (Outcome.FAIL, Reason.ABOVE_LIMIT)


def sampled(
    samples: Any, wanted: Any, *words: str, rows: tuple[str, ...] = ROWS, **more: Any
) -> Any:
    """What rows say of launches that were sampled like this."""
    return [case("baseline", what, spoil.parts(gpu_samples=samples), wanted, *words, **more)
            for what in rows]  # fmt: skip


def undated(kept: slice) -> Any:
    cut = spoil.at("ranks.0.steps", lambda steps: steps[kept])
    words = "its heartbeats lack the steps that the throughput rests on"
    return case("baseline", "gpu_utilisation", cut, NOTHING, words)


@pytest.mark.parametrize("holds", [
    *sampled(IDLE, TOO_UNEQUAL, rows=ROWS[1:2]),
    *sampled(IDLE, TOO_LITTLE, "least busy is GPU 1", rows=ROWS[:1]),
    *sampled(OTHERS, FINE),
    # A sampler that died in one of five launches: those that it left were busy, and passed.
    *sampled(DIED, NOTHING, "run3: no samples in the last ", rows=ROWS[:1], only=["run3"]),
    undated(slice(30)), undated(slice(-5, None)),
    # Samples that do not tell of both GPUs are missing and no fault.
    *sampled(None, NOTHING), *sampled(ONE, NOTHING),
    *sampled(TWO.assign(utilization_percent=math.nan), NOTHING, rows=ROWS[:2]),
    *sampled(TWO.assign(memory_used_mib=math.nan), NOTHING, rows=ROWS[2:]),
    # Without UUIDs only samples of as many GPUs count.
    *sampled(TWO.drop(columns="uuid"), FINE), *sampled(EIGHT.drop(columns="uuid"), NOTHING),
    # 100 steps in 0.2 s. It was a warning, and so a GO of GPUs that nobody had looked at.
    *(case("baseline", what, None, TOO_FEW, "too few to tell", remedy="--steps-scale", rate=4e6)
      for what in ROWS[:2]),
])  # fmt: skip
def test_one_idle_gpu_is_unbalanced_and_not_busy(holds: Callable[[], None]) -> None:
    holds()


def test_use_is_that_of_all_launches() -> None:
    check = answers.row("baseline", "gpu_utilisation", spoil.parts(gpu_samples=OTHERS))
    assert check.measurement is not None and check.measurement.value == 95.0
    assert len(check.measurement.sources) == 5


def test_of_several_launches_the_number_nearest_to_its_limit_is_shown_with_the_limit() -> None:
    def fuller(made: LaunchEvidence) -> LaunchEvidence:
        used = 40_960.0 if made.launch.name == "run2" else 8_192.0
        return spoil.parts(gpu_samples=machine_files.gpu_samples(2, used_mib=used))(made)

    check = says(answers.row("baseline", "memory_headroom", fuller), FINE)
    assert (check.measurement.value, check.comparator.value, check.limit) == (50.0, ">", 20.0)
    assert check.reason.startswith("5 launches: run2:") and check.limit_source


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
