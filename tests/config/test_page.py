"""The page of thresholds is what the declarations and the profiles say."""

from __future__ import annotations

from pathlib import Path

from scripts.thresholds_page import thresholds_page

PAGE = Path(__file__).parents[2] / "docs" / "thresholds.md"


def test_the_page_of_thresholds_is_what_its_script_prints() -> None:
    assert PAGE.read_text(encoding="utf-8") == thresholds_page()
