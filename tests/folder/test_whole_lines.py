"""Files that are read whole, in blocks of complete lines."""

from __future__ import annotations

import hashlib
import os
import tracemalloc
from pathlib import Path

import pytest

from runbook.folder.launch.lines import WholeLines


def test_a_digest_and_a_torn_tail_of_a_file_in_small_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runbook.folder.launch.lines._BLOCK_BYTES", 3)
    path = tmp_path / "x"
    path.write_bytes(b"one\ntwo, which is long\n\nthr")
    lines = WholeLines(path)
    assert b"".join(lines) == b"one\ntwo, which is long\n\n"
    assert lines.torn == b"thr"
    assert lines.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_long_tail_of_nuls_is_read_in_one_pass_and_in_the_memory_of_a_line(
    tmp_path: Path,
) -> None:
    """96 MiB of them, behind two lines and before one."""
    path = tmp_path / "x"
    path.write_bytes(b"one\ntwo\n")
    os.truncate(path, 96 << 20)
    tracemalloc.start()
    lines = WholeLines(path)
    assert b"".join(lines) == b"one\ntwo\n"
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (lines.torn_bytes, lines.endless, lines.unread) == ((96 << 20) - 8, 0, 0)
    assert peak < 80 << 20
    with path.open("ab") as stream:
        stream.write(b"end\nfour\n")
    lines = WholeLines(path)
    assert b"".join(lines) == b"one\ntwo\nfour\n"
    assert (lines.torn, lines.endless) == (b"", 1)
    assert lines.problems == [f"1 lines of over {16 << 20} bytes were dropped"]


def test_what_stands_behind_the_largest_log_is_not_read_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runbook.folder.launch.lines.LARGEST_LOG_BYTES", 10)
    path = tmp_path / "x"
    path.write_bytes(b"12345\n78\n0\n2\n")
    lines = WholeLines(path)
    assert b"".join(lines) == b"12345\n78\n"
    assert (lines.torn, lines.unread) == (b"0", 3)
    assert lines.problems == ["3 bytes behind the first 10 were not read"]
