"""Files that are whole or absent, and never shared."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from nsa.launch.output import LineFile, RecordWriteError, plain, write_json


def test_json_holds_no_bare_nan() -> None:
    assert plain({"a": float("nan"), "b": -math.inf, "c": 1.5, "d": None}) == {
        "a": "nan",
        "b": "-inf",
        "c": 1.5,
        "d": None,
    }


def test_line_files_are_never_shared(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    LineFile(path).append("one")
    with pytest.raises(FileExistsError):
        LineFile(path)
    assert path.read_text() == "one\n"


def test_a_full_disk_is_named() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    file = LineFile.__new__(LineFile)
    file.path, file._fd = full, os.open(full, os.O_WRONLY)
    with pytest.raises(RecordWriteError, match="cannot write /dev/full: No space left on device"):
        file.append("row")
    os.close(file._fd)


def test_json_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "no_such_folder" / "env.json"
    with pytest.raises(RecordWriteError, match=r"env\.json"):
        write_json(path, {})
    write_json(tmp_path / "env.json", {"a": 1})
    assert [p.name for p in tmp_path.iterdir()] == ["env.json"]
