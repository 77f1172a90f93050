"""report, for people as text and for machines as JSON; judge and compare share its arguments."""

from __future__ import annotations

from pathlib import Path

import pytest

from runbook.engine.derive import render
from runbook.folder.manifest import record_text, write_manifest
from tests.cli.shell import ESCAPE, inside, runbook
from tests.reports import samples


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    folder = tmp_path / "artifacts" / "20261121T010203Z-840303b"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(samples.no_go().model_dump_json())
    return folder


def test_the_newest_run_on_the_terminal(finished: Path, tmp_path: Path) -> None:
    ended = runbook("report", cwd=tmp_path)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == render(samples.no_go(), "terminal")
    assert ESCAPE not in ended.out


def test_a_file_that_changed_since_the_run_is_told(finished: Path, tmp_path: Path) -> None:
    """On stderr: the report says what the record says. A record alone is no change."""
    first = samples.no_go().artifacts[0].path
    assert inside("report", cwd=tmp_path).err == ""
    (finished / first).parent.mkdir(parents=True, exist_ok=True)
    (finished / first).write_text("edited\n")
    write_manifest(finished)
    ended = inside("report", cwd=tmp_path)
    assert f"changed since the run: {first}; see runbook verify" in ended.err
    assert ended.code == 0 and "changed since the run" not in ended.out


@pytest.mark.parametrize("command", ["report", "judge"])
def test_a_folder_that_is_a_link_out_of_the_run_is_told(
    finished: Path, tmp_path: Path, command: str
) -> None:
    """What is read through it is no file of the run, whatever it says."""
    (tmp_path / "elsewhere").mkdir()
    (finished / "baseline").symlink_to(tmp_path / "elsewhere")
    ended = inside(command, cwd=tmp_path)
    assert "changed since the run: baseline: a symbolic link; see runbook verify" in ended.err


@pytest.mark.parametrize("fmt", ["terminal", "md", "details", "html", "junit", "ctrf", "github"])
def test_no_format_shows_the_go_that_was_written_into_the_record(
    finished: Path, tmp_path: Path, fmt: str
) -> None:
    """A whole GO of another run, with all that a GO prints: none of it is repeated."""
    write_manifest(finished)
    (finished / "run.json").write_text(record_text(samples.go()))
    ended = inside("report", "--format", fmt, cwd=tmp_path)
    assert ended.code == 3
    assert "run.json is another file than its MANIFEST.sha256 has: nothing in it" in ended.out
    assert "INCOMPLETE" in ended.out and samples.go().headline not in ended.out
    assert "runbook launch" not in ended.out
