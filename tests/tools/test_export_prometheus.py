"""Numbers for other programs; what is written for Prometheus is what its own parser reads back."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict

import pytest

from runbook.records import Outcome, Reason, RunRecord, Verdict, judge_run
from runbook.tools.export import csv_text, numbers_of, prometheus_text
from tests.factory.records import check
from tests.reports import samples

parser = pytest.importorskip(
    "prometheus_client.parser", reason="prometheus-client is not installed (extra dev)"
)


def read(record: RunRecord) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample by name and labels."""
    found = {}
    for family in parser.text_string_to_metric_families(prometheus_text(record)):
        assert family.type == "gauge"
        assert family.documentation
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found
            found[key] = sample.value
    return found


def value(record: RunRecord, name: str, /, **labels: str) -> float:
    """The one sample of this name with these labels among its own."""
    wanted = set(labels.items())
    (found,) = [
        number for (key, own), number in read(record).items() if key == name and wanted <= own
    ]
    return found


def test_checks_are_counted_and_each_required_one_is_there() -> None:
    record = samples.no_go()
    assert value(record, "runbook_checks", outcome="PASS", required="true") == 2
    assert value(record, "runbook_checks", outcome="FAIL", required="true") == 1
    assert value(record, "runbook_checks", outcome="SKIPPED", required="false") == 1
    passed = {name: value(record, "runbook_required_check_passed", check=name)
              for name in record.required}  # fmt: skip
    assert passed["baseline.throughput"] == 0 and passed["long_run.no_halt"] == 1
    cut = samples.incomplete()
    assert value(cut, "runbook_required_check_passed", check="long_run.no_halt") == 0


def test_a_required_check_is_passed_where_the_verdict_says_so() -> None:
    """A first run has no accepted one to compare with, and is GO all the same."""

    def passed(code: Reason) -> tuple[float, Verdict]:
        name = "baseline.accepted"
        row = samples.baseline(check(name, Outcome.SKIPPED, code, required=True))
        record = samples.run(Verdict.GO, (row,), required=(name,))
        told = value(record, "runbook_required_check_passed", check=name)
        return told, judge_run(record.checks(), record.required)

    assert passed(Reason.NO_ACCEPTED_RUN) == (1.0, Verdict.GO)
    assert passed(Reason.NEEDS_CUDA) == (0.0, Verdict.INCOMPLETE)


def test_numbers_limits_and_times() -> None:
    record = samples.go()
    assert value(record, "runbook_value", name="baseline.throughput", unit="tok/s") == 47.25
    assert value(record, "runbook_limit", name="baseline.throughput", comparator=">=") == 39
    assert value(record, "runbook_duration_seconds") == 4377
    assert value(record, "runbook_end_timestamp_seconds") == 1795227300
    running = record.model_copy(update={"finished_at": None})
    names = {name for name, _ in read(running)}
    assert "runbook_duration_seconds" not in names
    assert "runbook_start_timestamp_seconds" in names


def test_csv_has_each_number_in_full_and_its_run() -> None:
    record = samples.no_go()
    rows = list(csv.DictReader(io.StringIO(csv_text(numbers_of(record)))))
    assert [row["name"] for row in rows] == [one.name for one in numbers_of(record)]
    first, whole = rows[0], asdict(numbers_of(record)[0])
    assert (first["run_id"], first["verdict"]) == (record.run_id, "NO-GO")
    assert float(first["low"]) == whole["low"]
    assert (first["required"], first["limit"]) == ("yes", "39.0")
    assert rows[-1]["limit"] == rows[-1]["outcome"] == ""
