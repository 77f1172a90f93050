"""What is handed over stays small and whole; what was left out is named."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest

from runbook.errors import RunbookError
from runbook.tools.acceptance.handover import ARCHIVE, FILES, hand_over, take_up, write_archive
from runbook.tools.acceptance.stages import load_stages
from runbook.tools.acceptance.state import State


def names(archive: Path) -> set[str]:
    with tarfile.open(archive) as tar:
        return set(tar.getnames())


def test_the_archive_keeps_to_its_limit_and_names_what_it_left_out(tmp_path: Path) -> None:
    work, archive = tmp_path / "work", tmp_path / "a.tar.gz"
    (work / "run").mkdir(parents=True)
    (work / "run" / "small.json").write_text("{}")
    (work / "run" / "noise").write_bytes(os.urandom(300_000))
    (work / "run" / "zeros").write_bytes(bytes(3_000_000))
    (work / "run" / "model.pt").write_bytes(b"weights")
    (work / "run" / "link").symlink_to("/etc/passwd")
    assert write_archive(work, archive, limit=200_000) == ["run/noise"]
    assert names(archive) == {"run/small.json", "run/zeros"}
    assert archive.stat().st_size <= 200_000
    assert write_archive(work, archive) == []
    assert names(archive) == {"run/small.json", "run/zeros", "run/noise"}


def test_a_file_that_is_damaged_on_the_way_is_refused(tmp_path: Path) -> None:
    work, out = tmp_path / "work", tmp_path / "out"
    out.mkdir()
    work.mkdir()
    (work / "noise").write_bytes(os.urandom(10_000))
    write_archive(work, out / ARCHIVE)
    data = (out / ARCHIVE).read_bytes()
    (out / ARCHIVE).write_bytes(data[: len(data) // 2])
    with pytest.raises(RunbookError, match="is damaged"):
        take_up(out, tmp_path / "fresh")


def test_work_that_is_there_is_not_replaced(tmp_path: Path) -> None:
    work, out = tmp_path / "work", tmp_path / "out"
    out.mkdir()
    work.mkdir()
    (work / "a").write_text("old")
    write_archive(work, out / ARCHIVE)
    (work / "a").write_text("new")
    assert not take_up(out, work)
    assert (work / "a").read_text() == "new"


def test_few_files_and_none_of_a_call_that_was_killed_while_it_wrote(tmp_path: Path) -> None:
    stages, out, work = load_stages(), tmp_path / "out", tmp_path / "work"
    work.mkdir()
    out.mkdir()
    (work / "progress.log").write_text("line\n")
    (out / ".everything.tar.gz.1.tmp").write_text("half")
    state = State.new("GPU", "h200x1", stages, stand_in=False)
    hand_over(state, stages, work, out, "runbook gpu-acceptance")
    assert {path.name for path in out.iterdir()} == set(FILES)
    assert len(FILES) <= 8
    text = (out / "summary.md").read_text()
    assert "STAND-IN" not in text and "    runbook gpu-acceptance" in text
