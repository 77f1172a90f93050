"""A note about a launch that ended well is shown beside it."""

from __future__ import annotations

from reports.templating import blame
from runbook.records import LaunchResult, LaunchStatus


def test_notes_and_causes_are_shown_together() -> None:
    done = LaunchResult(status=LaunchStatus.COMPLETED)
    assert blame(done) == "-"
    late = done.model_copy(update={"notes": ("straggler: rank 1",)})
    assert blame(late) == "note: straggler: rank 1"
    bad = late.model_copy(update={"cause": "hang", "culprit_rank": 0})
    assert blame(bad) == "hang (rank 0); note: straggler: rank 1"
