"""Files are written whole, folders are private."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from runbook.files import make_private_dir, read_given, typed_here, write_atomic
from tests.factory.programs import program


def test_writing_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_atomic(path, "old")
    write_atomic(path, "new")
    assert path.read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]
    with pytest.raises(OSError):
        write_atomic(tmp_path / "missing" / "x", "text")


def test_folders_are_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o000)
    try:
        make_private_dir(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("a", "a/b")] == [0o700] * 2
    with pytest.raises(FileExistsError):
        make_private_dir(tmp_path / "a" / "b")


def test_a_named_file_is_read_and_what_has_no_end_is_not(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    os.mkfifo(pipe := tmp_path / "pipe")
    assert read_given(tmp_path / "file") == b"x"
    for path, words in ((pipe, "save it as a file"), (Path("/dev/zero"), "save it as a file")):
        with pytest.raises(OSError, match=words):
            read_given(path)
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(OSError):
            read_given(path)


def test_where_the_program_is_not_on_the_path_its_own_is_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("runbook", "other.py"):
        program(tmp_path / "bin" / name, "true")
    monkeypatch.chdir(tmp_path)

    def typed(started: str, path: str) -> str:
        monkeypatch.setenv("PATH", path)
        monkeypatch.setattr(sys, "argv", [started])
        return typed_here()

    assert typed("bin/runbook", "") == "bin/runbook"
    assert typed("bin/runbook", str(tmp_path / "bin")) == typed("bin/other.py", "") == "runbook"
