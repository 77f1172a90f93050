"""Every number of a run comes once, with what it is held against; CSV says the same."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict

from runbook.records import Verdict
from runbook.tools.export import csv_text, numbers_of
from tests.reports import samples


def test_a_number_of_a_check_says_what_it_is_held_against() -> None:
    (one,) = [item for item in numbers_of(samples.no_go()) if item.name == "baseline.throughput"]
    assert (one.value, one.unit, one.n, one.outcome, one.required) == (23, "tok/s", 3, "FAIL", True)
    assert (one.comparator, one.limit, one.first_step, one.last_step) == (">=", 39, 51, 100)
    assert one.low == 23 * 0.97
    assert one.path == "baseline/launch_0/training.csv"


def test_texts_and_truths_are_no_numbers_and_nothing_comes_twice() -> None:
    names = [one.name for one in numbers_of(samples.go())]
    assert names == ["baseline.throughput", "long_run.no_halt", "long_run/training.csv"]
    phase = samples.long_run()
    again = phase.model_copy(update={"measurements": (phase.checks[0].measurement,)})
    assert [one.name for one in numbers_of(samples.run(Verdict.GO, (again,)))] == [
        "long_run.no_halt"
    ]


def test_csv_has_each_number_in_full_and_its_run() -> None:
    record = samples.no_go()
    rows = list(csv.DictReader(io.StringIO(csv_text(numbers_of(record)))))
    assert [row["name"] for row in rows] == [one.name for one in numbers_of(record)]
    first, whole = rows[0], asdict(numbers_of(record)[0])
    assert (first["run_id"], first["verdict"]) == (record.run_id, "NO-GO")
    assert float(first["low"]) == whole["low"]
    assert (first["required"], first["limit"]) == ("yes", "39.0")
    assert rows[-1]["limit"] == rows[-1]["outcome"] == ""
