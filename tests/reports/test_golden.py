"""The whole text of each format, for a GO, a NO-GO and an INCOMPLETE run."""

from __future__ import annotations

import pytest

from runbook.config import registry
from runbook.engine import derive
from tests.reports.samples import GOLDEN, SAMPLES


@pytest.mark.parametrize(
    ("name", "fmt"),
    [(name, fmt) for name in SAMPLES for fmt in registry.names(registry.REPORT_GROUP)],
)
def test_report_is_exactly_the_golden_one(name: str, fmt: str) -> None:
    expected = (GOLDEN / name / registry.report_files()[fmt]).read_text(encoding="utf-8")
    assert derive.render(SAMPLES[name](), fmt) == expected
