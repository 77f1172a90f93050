"""The whole text of each format, for a GO, a NO-GO and an INCOMPLETE run."""

from __future__ import annotations

from pathlib import Path

import pytest

import reports
from tests.reports.samples import SAMPLES, go

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("fmt", reports.FORMATS)
@pytest.mark.parametrize("name", SAMPLES)
def test_report_is_exactly_the_golden_one(name: str, fmt: str) -> None:
    expected = (GOLDEN / name / reports.FILE_NAMES[fmt]).read_text(encoding="utf-8")
    assert reports.render(SAMPLES[name](), fmt) == expected


@pytest.mark.parametrize("fmt", reports.FORMATS)
def test_one_changed_value_changes_every_report(fmt: str) -> None:
    record = go()
    dump = record.model_dump(mode="json")
    dump["phases"][1]["checks"][0]["measurement"]["value"] = 47.35
    changed = type(record).model_validate(dump)
    assert reports.render(changed, fmt) != reports.render(record, fmt)


@pytest.mark.parametrize("fmt", reports.FORMATS)
def test_report_survives_storing_the_record(fmt: str) -> None:
    record = go()
    stored = type(record).model_validate_json(record.model_dump_json())
    assert reports.render(stored, fmt) == reports.render(record, fmt)
