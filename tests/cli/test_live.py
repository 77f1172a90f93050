"""`runbook watch` refuses a directory in which no run will ever write, and names the right one."""

from __future__ import annotations

from pathlib import Path

import pytest

from runbook.cli import main


def test_the_folder_above_the_runs_is_refused_and_the_newest_run_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "20260101T000000Z-abc"
    run.mkdir()
    (tmp_path / "latest").symlink_to(run.name)
    assert main(["watch", str(tmp_path), "--halt", "1"]) == 2
    assert f"{tmp_path}/latest is" in capsys.readouterr().err


def test_a_directory_that_is_not_there_is_called_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", str(tmp_path / "nowhere")]) == 2
    assert "no such directory" in capsys.readouterr().err
