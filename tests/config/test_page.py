"""The page of thresholds is what the declarations and the profiles say."""

from __future__ import annotations

from pathlib import Path

import pytest

from runbook.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "thresholds.md"


def test_the_page_of_thresholds_is_what_the_command_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["profiles", "--page"]) == 0
    printed = capsys.readouterr().out
    assert PAGE.read_text(encoding="utf-8") == printed
