"""Rows of a damaged file: which of them count, what is said of the others."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from runbook.folder.launch.lines import TableTail
from runbook.folder.launch.rows import RowSpec, read_rows
from runbook.records.evidence import RowFile

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


@pytest.mark.parametrize(
    ("step", "good"),
    [(2**53, True), (-(2**53), True), (2**53 + 2, False), ("1.5", False), ("inf", False)],
)
@pytest.mark.parametrize("damage", ["", "9,x\n"])
def test_a_whole_number_is_exact(tmp_path: Path, step: object, good: bool, damage: str) -> None:
    rows = read(tmp_path, f"{HEAD}1,a,1,1\n{step},a,1,1\n{damage}")
    assert rows.frame["step"].tolist() == [1, *([step] * good)]
    assert rows.dropped_rows == (not good) + bool(damage)


@pytest.mark.parametrize(
    ("row", "good"),
    [
        ("2,a,,1", False),
        ("2,a, ,1", False),
        ("2,a,x,1", False),
        ("2,a,1,x", False),
        ("2,a,nan,1", True),
        ("2,a,-NaN,inf", True),
        ("2,a,1,1,1", False),
        ("2,a,1", False),
        ("2,a,1,1,3,a,1,1", False),
        ("1_0,a,1,1", False),
        ("2,a,1,1\r", True),
    ],
)
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


@pytest.mark.parametrize(
    ("first", "says"),
    [
        ("step,rate,rate,a,a\n", "the header names columns twice: a, rate"),
        ("z" * 70 + "\n", f"the first line is not a header that begins with 'step': {b'z' * 60!r}"),
        ("1,2,3\n", "the first line is not a header that begins with 'step': b'1,2,3'"),
        ("x,2\n", "the first line is not a header that begins with 'step': b'x,2'"),
    ],
)
def test_a_first_line_that_is_no_header(tmp_path: Path, first: str, says: str) -> None:
    rows = read(tmp_path, first + "1,2,3\n")
    assert (rows.problems, rows.damaged, len(rows.frame)) == ((says,), True, 0)
    assert tuple(rows.frame.columns) == SPEC.columns


def test_the_older_form_has_no_header(tmp_path: Path) -> None:
    rows = read(tmp_path, "1,2\n2,3\n")
    assert rows.legacy and not rows.damaged
    assert rows.frame.to_dict("list") == {"step": [1, 2], "rate": [2.0, 3.0]}


# Following it while it grows


def test_the_tail_reads_the_older_form_too(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("1,5\n1,2,3\n2,6\n")
    tail = TableTail(path, headerless=("step", "rate"))
    assert list(tail.rows()) == [{"step": "1", "rate": "5"}, {"step": "2", "rate": "6"}]
    assert list(TableTail(path).rows()) == []
    path.write_text("step,rate,x\n1,2\n1,2,3\n")
    assert list(TableTail(path, headerless=("step", "rate")).rows()) == [
        {"step": "1", "rate": "2", "x": "3"}
    ]
