"""Files that grow, each complete line once; files that are read whole, in blocks of such lines."""

from __future__ import annotations

import hashlib
import os
import tracemalloc
from pathlib import Path

import pytest

from runbook.folder.launch.evidence import read_training_csv
from runbook.folder.launch.lines import LineTail, TableTail, WholeLines
from tests.factory.files import HEADER, row, training
from tests.tiers import few


def test_every_split_of_a_file_gives_the_same_rows(tmp_path: Path) -> None:
    data = training(5).encode()
    for cut in few(range(len(data) + 1)):
        path = tmp_path / f"{cut}.csv"
        path.write_bytes(data[:cut])
        tail = TableTail(path)
        seen = list(tail.rows())
        whole = read_training_csv(path, relative_to=tmp_path)
        assert [int(r["step"]) for r in seen] == whole.frame["step"].tolist()
        with path.open("ab") as stream:
            stream.write(data[cut:])
        assert [r["step"] for r in [*seen, *tail.rows()]] == ["1", "2", "3", "4", "5"]


def test_nul_tails_and_foreign_lines_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "training.csv"
    path.write_bytes(f"{HEADER}\n{row(1)}\n".encode() + b"\0" * 40 + b"\n" + b"a,b\n")
    with path.open("ab") as stream:
        stream.write(f"{row(2)}\n".encode())
    assert [r["step"] for r in TableTail(path).rows()] == ["1", "2"]


def test_a_file_that_is_shorter_or_another_one_is_read_anew(tmp_path: Path) -> None:
    path, other = tmp_path / "x", tmp_path / "y"
    path.write_bytes(b"one\n")
    tail = LineTail(path)
    assert list(tail.lines()) == [b"one"]
    other.write_bytes(b"two\n")
    other.replace(path)
    assert list(tail.lines()) == [b"two"]
    path.write_bytes(b"3\n")
    assert list(tail.lines()) == [b"3"]
    assert list(tail.lines()) == []


def test_of_a_file_that_grew_by_more_than_is_read_at_once_the_end_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runbook.folder.launch.lines.LARGEST_LOG_BYTES", 2 << 20)
    path = tmp_path / "x"
    lines = b"%07d\n" * (1 << 18) % tuple(range(1 << 18))
    path.write_bytes(lines)
    assert len(list(LineTail(path).lines())) == 1 << 18
    with path.open("ab") as stream:
        stream.write(b"0262144\n")
    seen = list(LineTail(path).lines())
    assert (len(seen), seen[-1]) == (1 << 17, b"0262144")


def test_a_log_that_is_put_in_its_own_place_goes_on_unless_it_begins_otherwise(
    tmp_path: Path,
) -> None:
    tail, path = LineTail(tmp_path / "m.csv", replaced=True), tmp_path / "m.csv"
    assert list(tail.lines()) == []
    path.write_text("a\n1\n")
    assert list(tail.lines()) == [b"a", b"1"]
    with path.open("a") as more:
        more.write("2\n3")
    assert list(tail.lines()) == [b"2"] and tail.anew == 0
    (tmp_path / "new").write_text("a\n1\n2\n3\n4\n")
    (tmp_path / "new").replace(path)
    assert list(tail.lines()) == [b"3", b"4"] and tail.anew == 0
    path.write_text("a,b\n1,\n2,\n3,\n4,\n")
    assert next(tail.lines()) == b"a,b" and tail.anew == 1


def test_a_pipe_in_the_place_of_a_log_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.csv")
    tail = LineTail(tmp_path / "m.csv")
    assert list(tail.lines()) == [] and tail.changed_at is None


def test_a_progress_bar_ends_its_lines_as_it_writes_them(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"10%\r20%\rdone\nhalf")
    assert list(LineTail(tmp_path / "log", ends=b"\n\r").lines()) == [b"10%", b"20%", b"done"]


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


def test_in_small_blocks_digest_and_torn_tail_are_of_what_the_largest_log_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = b"one\ntwo, which is long\n\nthr"
    monkeypatch.setattr("runbook.folder.launch.lines._BLOCK_BYTES", 3)
    monkeypatch.setattr("runbook.folder.launch.lines.LARGEST_LOG_BYTES", len(data))
    path = tmp_path / "x"
    path.write_bytes(data + b"ee\n")
    lines = WholeLines(path)
    assert b"".join(lines) == data[:-3]
    assert (lines.torn, lines.unread) == (b"thr", 3)
    assert lines.problems == [f"3 bytes behind the first {len(data)} were not read"]
    assert lines.sha256 == hashlib.sha256(data).hexdigest()
