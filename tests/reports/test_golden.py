"""The whole text of each format, for a GO, a NO-GO and an INCOMPLETE run."""

from __future__ import annotations

import pytest

from runbook.config import registry
from runbook.engine import derive
from tests.reports.regold import GOLDEN
from tests.reports.samples import SAMPLES, go


@pytest.mark.parametrize(
    ("name", "fmt"),
    [(name, fmt) for name in SAMPLES for fmt in registry.names(registry.REPORT_GROUP)],
)
def test_report_is_exactly_the_golden_one(name: str, fmt: str) -> None:
    expected = (GOLDEN / name / registry.report_files()[fmt]).read_text(encoding="utf-8")
    assert derive.render(SAMPLES[name](), fmt) == expected


# Annotations tell problems, and no number that is well.
@pytest.mark.parametrize("fmt", sorted({*registry.names(registry.REPORT_GROUP)} - {"github"}))
def test_one_changed_value_changes_every_report(fmt: str) -> None:
    record = go()
    dump = record.model_dump(mode="json")
    dump["phases"][1]["checks"][0]["measurement"]["value"] = 47.35
    changed = type(record).model_validate(dump)
    assert derive.render(changed, fmt) != derive.render(record, fmt)
