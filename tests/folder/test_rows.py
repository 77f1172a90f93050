"""Rows of a damaged file, and of one that grows: which count, what is said of the others."""

from __future__ import annotations

import hashlib
import math
import os
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runbook.folder.launch import LineTail, TableTail, WholeLines
from runbook.folder.launch.evidence import read_training_csv
from runbook.folder.launch.rows import RowSpec, read_rows
from runbook.records.evidence import RowFile, TrainingLog
from tests.factory.files import HEADER, legacy, row, training
from tests.factory.tables import table
from tests.tiers import examples, few

SPEC = RowSpec(
    columns=("step", "name", "gap", "rate"),
    text=frozenset({"name"}),
    filled=frozenset({"step", "rate"}),
    whole=frozenset({"step"}),
    headerless=("step", "rate"),
)
HEAD = "step,name,rate,gap\n"


def read(folder: Path, text: str | bytes) -> RowFile:
    path = folder / "t.csv"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_rows(path, SPEC)


@pytest.mark.parametrize("damage", ["", "9,x\n"])
def test_an_empty_cell_is_nan_in_a_whole_file_and_in_a_damaged_one(
    tmp_path: Path, damage: str
) -> None:
    rows = read(tmp_path, HEAD + "1,a b,2.5,\n2,, 3.5 ,0.5\n" + damage)
    assert rows.frame["step"].tolist() == [1, 2] and rows.frame["step"].dtype == "int64"
    assert rows.frame["name"].tolist() == ["a b", ""]
    assert rows.frame["rate"].tolist() == [2.5, 3.5]
    assert math.isnan(rows.frame["gap"][0]) and rows.frame["gap"][1] == 0.5
    assert list(rows.problems) == ["1 unreadable rows were dropped"] * bool(damage)
    assert (rows.damaged, rows.dropped_rows) == (bool(damage), int(bool(damage)))


@table(__file__, "whole_numbers")
@pytest.mark.parametrize("damage", ["", "9,x\n"])
def test_a_whole_number_is_exact(tmp_path: Path, step: object, good: bool, damage: str) -> None:
    rows = read(tmp_path, f"{HEAD}1,a,1,1\n{step},a,1,1\n{damage}")
    assert rows.frame["step"].tolist() == [1, *([step] * good)]
    assert rows.dropped_rows == (not good) + bool(damage)


@table(__file__, "rows")
def test_a_row_that_can_be_read(tmp_path: Path, row: str, good: bool) -> None:
    rows = read(tmp_path, f"{HEAD}1,a,1,1\n{row}\n3,a,1,1\n")
    assert rows.frame["step"].tolist() == [1, *([2] * good), 3]


def test_everything_that_is_wrong_is_counted(tmp_path: Path) -> None:
    body = "1,a,1,1\n" + HEAD * 2 + "2,a\n" * 3 + "\0\n" * 4 + "5,a,1,1\n" + "6,a,\0\0"
    rows = read(tmp_path, HEAD + body)
    assert rows.frame["step"].tolist() == [1, 5]
    assert list(rows.problems) == [
        "a torn last line that ends in NUL bytes was dropped (6 bytes)",
        "the header occurs 2 more times",
        "4 rows hold NUL bytes and were dropped",
        "3 unreadable rows were dropped",
    ]
    assert (rows.dropped_rows, rows.damaged) == (8, True)


def test_the_header_may_have_a_mark_spaces_and_another_order(tmp_path: Path) -> None:
    rows = read(tmp_path, "\ufeffstep , more,rate\r\n1,x,2\r\n")
    assert rows.frame.to_dict("list") == {"step": [1], "rate": [2.0]}
    assert (rows.problems, rows.legacy) == ((), False)


@table(__file__, "first_lines")
def test_a_first_line_that_is_no_header(tmp_path: Path, first: str, says: str) -> None:
    rows = read(tmp_path, first + "1,2,3\n")
    assert (rows.problems, rows.damaged, len(rows.frame)) == ((says,), True, 0)
    assert tuple(rows.frame.columns) == SPEC.columns


def read_training(folder: Path, data: str | bytes) -> TrainingLog:
    path = folder / "training.csv"
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return read_training_csv(path, relative_to=folder)


@examples(200)
@given(st.lists(st.floats(allow_nan=False, width=64), min_size=1, max_size=20))
def test_every_float_is_read_exactly(
    tmp_path_factory: pytest.TempPathFactory, values: list[float]
) -> None:
    lines = [f"{i},{value!r},0.1,1.0" for i, value in enumerate(values, start=1)]
    text = "step,loss,lr,toks_per_s\n" + "\n".join(lines) + "\n"
    log = read_training(tmp_path_factory.mktemp("csv"), text)
    assert list(log.frame["loss"]) == values


@pytest.mark.parametrize("text", [training(12), legacy(12)], ids=["header", "headerless"])
def test_truncation_at_every_byte_keeps_the_complete_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """Whatever the blocks in which the file is read."""
    monkeypatch.setattr("runbook.folder.launch._BLOCK_BYTES", 37)
    data = text.encode()
    first = 1 if text.startswith("step") else 0
    for length in few(range(len(data) + 1)):
        log = read_training(tmp_path, data[:length])
        whole = data[:length].decode().split("\n")[:-1][first:]
        assert list(log.frame["step"]) == [int(line.split(",")[0]) for line in whole]
        assert list(log.frame["toks_per_s"]) == [float(line.split(",")[3]) for line in whole]
        torn = length > 0 and data[length - 1 : length] != b"\n"
        assert log.dropped_rows == int(torn)
        assert not log.damaged


def test_two_writers_are_damage(tmp_path: Path) -> None:
    lines = [HEADER, *(row(step) for step in range(1, 20) for _writer in range(2))]
    log = read_training(tmp_path, "\n".join(lines) + "\n")
    assert log.damaged
    assert any("several runs, two writers, or rows written twice" in text for text in log.problems)


@examples(300)
@given(st.binary(max_size=200))
def test_no_bytes_make_it_raise(tmp_path_factory: pytest.TempPathFactory, noise: bytes) -> None:
    folder = tmp_path_factory.mktemp("noise")
    read_training(folder, noise)
    log = read_training(folder, training(3).encode() + noise)
    assert list(log.frame["step"])[:3] == [1, 2, 3]


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
    monkeypatch.setattr("runbook.folder.launch.LARGEST_LOG_BYTES", 2 << 20)
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
    monkeypatch.setattr("runbook.folder.launch._BLOCK_BYTES", 3)
    monkeypatch.setattr("runbook.folder.launch.LARGEST_LOG_BYTES", len(data))
    path = tmp_path / "x"
    path.write_bytes(data + b"ee\n")
    lines = WholeLines(path)
    assert b"".join(lines) == data[:-3]
    assert (lines.torn, lines.unread) == (b"thr", 3)
    assert lines.problems == [f"3 bytes behind the first {len(data)} were not read"]
    assert lines.sha256 == hashlib.sha256(data).hexdigest()
