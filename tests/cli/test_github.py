"""A run inside GitHub Actions: what the runner is told, and what it writes into its files."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from runbook.cli.run.observers import (
    LogConsole,
    harmless,
    observer_for,
    tell_github,
)
from runbook.console import Console, OutputFormat
from runbook.engine.derive import render
from runbook.folder.manifest import fingerprint_of
from tests.cli.test_observers import play
from tests.reports import samples


def test_the_lines_of_a_run_go_where_its_commands_do() -> None:
    out, err = io.StringIO(), io.StringIO()
    console = Console(stdout=out, stderr=err)
    play(observer_for(console, OutputFormat.GITHUB), samples.no_go())
    assert err.getvalue() == ""
    (line, *_) = (one for one in out.getvalue().splitlines() if one.startswith(" 1/4"))
    assert line.split()[:3] == ["1/4", "preflight", "PASS"]


@pytest.mark.parametrize(
    "text",
    ["::error::x", "  ::stop-commands::x", "fine\n::add-mask::x", "a ##[error]x", "\t::group::"],
)
def test_nothing_that_a_trainer_says_is_a_command(text: str) -> None:
    out = io.StringIO()
    console = LogConsole(Console(stdout=out, stderr=io.StringIO()))
    console.progress(text)
    console.result(text)
    for line in out.getvalue().splitlines():
        assert not line.lstrip().startswith("::") and "##[" not in line
    assert harmless("rate: 5::6 [x]") == "rate: 5::6 [x]"


def test_summary_and_outputs_are_appended(tmp_path: Path) -> None:
    out, record = io.StringIO(), samples.no_go()
    summary, outputs = tmp_path / "summary.md", tmp_path / "outputs"
    summary.write_text("of a step before\n")
    tell_github(
        LogConsole(Console(stdout=out, stderr=io.StringIO())),
        record,
        tmp_path / "run",
        exit_code=1,
        variables={"GITHUB_STEP_SUMMARY": str(summary), "GITHUB_OUTPUT": str(outputs)},
    )
    assert out.getvalue() == render(record, "github")
    assert summary.read_text() == "of a step before\n" + render(record, "md")
    assert outputs.read_text().splitlines() == [
        "verdict=NO-GO",
        "exit_code=1",
        f"run={tmp_path}/run",
        f"fingerprint={fingerprint_of(record)}",
        f"report={tmp_path}/run/report.md",
    ]


def test_a_file_that_cannot_be_written_is_said_and_changes_nothing(tmp_path: Path) -> None:
    out, err = io.StringIO(), io.StringIO()
    tell_github(
        LogConsole(Console(stdout=out, stderr=err)),
        samples.go(),
        tmp_path,
        exit_code=0,
        variables={"GITHUB_OUTPUT": str(tmp_path)},
    )
    assert f"$GITHUB_OUTPUT ({tmp_path}) cannot be written: Is a directory" in out.getvalue()
