"""Baseline: throughput, compression, GPUs, MFU."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import datetime, timedelta
from itertools import cycle, islice
from typing import Any

import pandas as pd
import pytest

from runbook.files import utc_text
from runbook.records import Check, LaunchStatus, Outcome
from runbook.records.evidence import LaunchEvidence
from tests.phases import answers, builder, machine_files, spoil, trainer
from tests.phases.answers import WHERE, case, says
from tests.phases.spoil import Change, at


def throughput(*rates: float) -> Check:
    """The row; the launches have these rates in turn."""
    five = builder.baseline_at(*islice(cycle(rates), 5))
    return builder.row("baseline", "throughput", five["baseline"], WHERE)


@pytest.mark.parametrize(("rates", "wanted"), [
    ((50.0, 50.5, 49.5), "PASS ok"), ((38.0, 40.0, 39.4), "INCONCLUSIVE undecided"),
    ((37.0, 37.1, 36.9), "FAIL below_limit"),
])  # fmt: skip
def test_a_bound_of_all_launches_decides(rates: tuple[float, ...], wanted: Any) -> None:
    says(throughput(*rates), wanted)


def test_one_gpu_that_idles_is_told_about_its_host_and_not_about_links() -> None:
    where = builder.with_profile(builder.context("h100x1"), limits={"gpu_utilisation": 99.9})
    check = answers.row("baseline", "gpu_utilisation", where=where)
    says(check, "FAIL below_limit", remedy="waits for the host")
    assert "NSA_DDP" not in check.remedy and "PCIe" not in check.remedy


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
GONE = "INCOMPLETE missing_artifact"
DIED = TWO.head(len(TWO) * 6 // 10)


def sampled(
    samples: Any, wanted: Any, *words: str, rows: tuple[str, ...] = ROWS, **more: Any
) -> Any:
    """What rows say of launches that were sampled like this."""
    return [case("baseline", what, spoil.parts(gpu_samples=samples), wanted, *words, **more)
            for what in rows]  # fmt: skip


def undated(kept: slice) -> Any:
    cut = spoil.at("ranks.0.steps", lambda steps: steps[kept])
    words = "its heartbeats lack the steps that the throughput rests on"
    return case("baseline", "gpu_utilisation", cut, "INCOMPLETE missing_artifact", words)


@pytest.mark.parametrize("holds", [
    *sampled(IDLE, "FAIL above_limit", rows=ROWS[1:2]),
    *sampled(IDLE, "FAIL below_limit", "least busy is GPU 1", rows=ROWS[:1]),
    *sampled(OTHERS, "PASS ok"),
    # A sampler that died in one of five launches: those that it left were busy, and passed.
    *sampled(DIED, GONE, "run3: no samples in the last ", rows=ROWS[:1], only=["run3"]),
    undated(slice(30)), undated(slice(-5, None)),
    # Samples that do not tell of both GPUs are missing and no fault; without UUIDs only samples of
    # as many GPUs count.
    *sampled(ONE, GONE), *sampled(EIGHT.drop(columns="uuid"), GONE),
    *sampled(TWO.drop(columns="uuid"), "PASS ok"),
])  # fmt: skip
def test_one_idle_gpu_is_unbalanced_and_not_busy(holds: Callable[[], None]) -> None:
    holds()


def test_of_several_launches_the_number_nearest_to_its_limit_is_shown_with_the_limit() -> None:
    def fuller(made: LaunchEvidence) -> LaunchEvidence:
        used = 40_960.0 if made.launch.name == "run2" else 8_192.0
        return spoil.parts(gpu_samples=machine_files.gpu_samples(2, used_mib=used))(made)

    check = says(answers.row("baseline", "memory_headroom", fuller), "PASS ok")
    assert (check.measurement.value, check.comparator.value, check.limit) == (50.0, ">", 20.0)
    assert check.reason.startswith("5 launches: run2:") and check.limit_source


def test_of_a_gpu_the_fullest_moment_counts_wherever_it_is() -> None:
    def once(made: LaunchEvidence) -> LaunchEvidence:
        samples = machine_files.gpu_samples(2, used_mib=8_192.0)
        samples.loc[[3, 5], "memory_used_mib"] = (math.nan, 40_960.0)
        return spoil.parts(gpu_samples=samples)(made)

    check = answers.row("baseline", "memory_headroom", once)
    assert (check.outcome, check.measurement.value) == ("PASS", 50.0)


def test_the_table_shows_the_documented_statistic_beside_ours() -> None:
    judgement = builder.judge("baseline", builder.evidence("baseline", WHERE, rate=50.0), WHERE)
    (table,) = judgement.tables
    assert [row[0] for row in table.rows] == [f"run{number}" for number in range(1, 6)]
    assert table.rows[0][1:5] == (50.0, 0.0, "steps 11-60", 50.0)
    assert len(judgement.measurements) == 5


def test_a_mean_of_launches_names_every_file_it_rests_on() -> None:
    check = throughput(50.0, 50.5, 49.5)
    assert (check.limit, check.comparator.value, check.limit_source) == (39, ">=", "requirement B3")
    assert (check.measurement.n, check.measurement.unit) == (5, "tok/s")
    assert check.measurement.value == pytest.approx(50.0, rel=1e-2)
    folders = [f"baseline/run{number}" for number in range(1, 6)]
    told = {source.path: source.sha256 for source in check.measurement.sources}
    wanted = {f"{one}/training.csv": trainer.digest_of(one) for one in folders}
    assert list(told.items()) == list(wanted.items()) and set(told) <= set(check.evidence)


# What the harness keeps of a machine beside a launch proves nothing if it is of another time.

# The launch began at 23:59:54 and ended at 00:00:10.
BEGAN, ENDED = "2025-12-31T23:59:54Z", "2026-01-01T00:00:10Z"
OWN_TIMES = {"devices_before.taken_at": BEGAN, "devices_after.taken_at": ENDED,
             "kernel_log.began_at": BEGAN, "kernel_log.ended_at": ENDED}  # fmt: skip


def checked(change: Change, what: str = "devices") -> Any:
    return answers.row("baseline", what, change, WHERE, only=["run1"])


@pytest.mark.parametrize("place", OWN_TIMES)
def test_documents_that_tell_of_another_time_prove_nothing(place: str) -> None:
    def moved(seconds: float) -> Change:
        then = datetime.fromisoformat(OWN_TIMES[place]) + timedelta(seconds=seconds)
        return at(place, utc_text(then))

    assert checked(moved(40.0)).outcome is Outcome.PASS
    for seconds in (-10.0, 90.0):
        says(checked(moved(seconds)), "INVALID mismatch", "is of another time", "the launch ")


@pytest.mark.parametrize("days", [-30, 1 / 24])
@pytest.mark.parametrize("what", ["devices", "gpu_utilisation"])
def test_samples_of_another_time_prove_nothing(what: str, days: float) -> None:
    def redated(table: pd.DataFrame) -> Any:
        shifted = pd.to_datetime(table["timestamp"]) + pd.Timedelta(days=days)
        return shifted.dt.strftime("%Y/%m/%d %H:%M:%S.%f").str[:-3]

    change = at("gpu_samples", timestamp=redated)
    says(checked(change, what), "INVALID mismatch", "gpu_samples.csv is of another time")


SILENT = {key: value for key, value in machine_files.no_devices().items() if key != "taken_at"}
STOPPED = spoil.both(at("devices_after", **SILENT), spoil.ended(LaunchStatus.INTERRUPTED))


@pytest.mark.parametrize(("change", "wanted"), [
    # The link of a GPU that rests before and after the steps.
    (at("gpu_samples", pcie_gen=lambda t: 1.0 + 3.0 * (t["utilization_percent"] > 50)), "PASS ok"),
    (at("gpu_samples", other_processes=lambda t: 1.0 * (t.index == 120)), "PASS warning"),
    # We ended it, and did not wait for an answer.
    (STOPPED, "PASS warning"),
])  # fmt: skip
def test_a_moment_beside_the_steps_is_no_fault(change: Change, wanted: Any) -> None:
    says(checked(change), wanted)
