"""One number through the runs: only what is comparable is on one line."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from runbook.cli import main
from runbook.records import RunRecord
from runbook.records.run import Ran
from runbook.tools.history import read_history, sparkline, trends
from tests.engine.test_history import store
from tests.reports.samples import go

METRIC = "baseline.throughput"
RAN = Ran(
    device="cuda", name="NVIDIA A100 80GB PCIe", ranks=2, parameters=1, seq_len=2048,
    global_batch=2, accumulation=1, dtype="bf16",
)  # fmt: skip


def at(rate: float, ran: Ran = RAN, **fields: object) -> RunRecord:
    """A run whose baseline gave this rate on these devices."""
    record = go()
    phases = []
    for phase in record.phases:
        checks = tuple(
            check.model_copy(
                update={"measurement": check.measurement.model_copy(update={"value": rate})}
            )
            if check.id == METRIC and check.measurement
            else check
            for check in phase.checks
        )
        phases.append(phase.model_copy(update={"checks": checks, "ran": (ran,)}))
    return record.model_copy(update={"phases": tuple(phases), **fields})


def fill(out: Path) -> Path:
    for day, rate in enumerate((40.0, 44.0, 33.0), start=1):
        store(out, f"r{day}", at(rate), started_at=f"2026-11-0{day}T00:00:00Z")
    return out


def test_each_value_is_held_against_the_median_of_the_earlier_ones(tmp_path: Path) -> None:
    (trend,) = trends(read_history(fill(tmp_path)).metric(METRIC))
    assert trend.numbers == (40.0, 44.0, 33.0)
    assert trend.changes() == [
        None,
        (pytest.approx(0.1), 1),
        (pytest.approx(33.0 / 42.0 - 1), 2),
    ]


@pytest.mark.parametrize(
    "other",
    [
        {"profile_sha256": "f" * 64},
        {"settings": {"NSA_DDP_BUCKET_MB": "25"}},
        {"options": {"steps_scale": 0.5}},
        {"ran": RAN.model_copy(update={"name": "NVIDIA H200"})},
        {"ran": RAN.model_copy(update={"seq_len": 128})},
        {"ran": RAN.model_copy(update={"ranks": 1})},
    ],
)
def test_what_is_not_comparable_is_on_a_line_of_its_own(
    tmp_path: Path, other: dict[str, object]
) -> None:
    record = at(900.0, **other)  # type: ignore[arg-type]
    store(fill(tmp_path), "r9", record, started_at="2026-11-09T00:00:00Z")
    found = trends(read_history(tmp_path).metric(METRIC))
    assert [len(trend.rows) for trend in found] == [3, 1]
    assert found[1].changes() == [None]


@pytest.mark.parametrize(
    ("values", "blocks", "plain"),
    [
        ([1.0, 2.0, 3.0], "▁▅█", "_~#"),
        ([5.0, 5.0], "▅▅", "++"),
        ([1.0], "", ""),
        ([], "", ""),
        ([-1e308, 1e308], "▁█", "_#"),
    ],
)
def test_a_sparkline(values: list[float], blocks: str, plain: str) -> None:
    assert sparkline(values) == blocks
    assert sparkline(values, plain=True).isascii()
    assert len(sparkline(values, plain=True)) == len(plain)


def test_the_command_draws_the_trend(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(fill(tmp_path))]
    assert main(["history", METRIC, *out]) == 0
    text = capsys.readouterr().out
    assert "▅█▁  33 to 44 tok/s, 3 runs" in text
    assert "-21.4% (median of 2)" in text
    assert main(["history", METRIC, "--csv", *out]) == 0
    rows = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert len({row["line"] for row in rows}) == 1
