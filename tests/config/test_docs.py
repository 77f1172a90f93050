"""The page of thresholds is what the profiles say."""

from __future__ import annotations

from pathlib import Path

from runbook import registry
from tests.config.thresholds import PAGE, page

PHASES = registry.phases()


def test_the_page_of_thresholds_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tests.config.thresholds"


def test_the_page_of_phases_has_every_phase_and_row() -> None:
    text = (Path(PAGE).parent / "phases.md").read_text(encoding="utf-8")
    for name in PHASES:
        assert f"`{name}`" in text
