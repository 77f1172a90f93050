"""Files are written whole, folders are private."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runbook.files import make_private_dir, write_atomic


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
