"""Which pictures a record has, and that none breaks the page."""

from __future__ import annotations

from reports.plots import figures
from tests.reports.samples import go


def test_a_record_shows_its_course_its_intervals_and_its_curves() -> None:
    assert [(one.kind, one.phase) for one in figures(go())] == [
        ("timeline", ""),
        ("interval", "baseline"),
        ("trace", "long_run"),
    ]
