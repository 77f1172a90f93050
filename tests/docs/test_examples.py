"""The examples in the documents: each is there, ended as it had to, and is as short as promised."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.examples.__main__ import (
    BEGIN,
    END,
    EXAMPLES,
    REPORTS,
    Example,
    command,
    table,
    verdict_line,
)
from runbook.cli import main

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs" / "examples"
ENDS = {0: ("GO",), 1: ("NO-GO",), 3: ("INCOMPLETE",), 4: ("PARTIAL PASS",)}


@pytest.fixture(params=EXAMPLES, ids=lambda example: example.name)
def example(request: pytest.FixtureRequest) -> Example:
    found: Example = request.param
    return found


def test_it_is_there_and_ended_as_it_had_to(example: Example) -> None:
    folder = DOCS / example.name
    assert all((folder / name).stat().st_size for name in REPORTS)
    assert verdict_line(folder / "report.md").startswith(ENDS[example.exit_code])


def test_it_can_be_planned(
    example: Example, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = command(example, tmp_path)
    assert main([*words[words.index("run") :], "--dry-run"]) == 0, capsys.readouterr().err


def test_the_index_is_the_one_that_the_command_writes() -> None:
    assert f"{BEGIN}\n{table(DOCS)}\n{END}" in (DOCS / "README.md").read_text(encoding="utf-8")
