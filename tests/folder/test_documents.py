"""Small files of a run directory: how much of them is read, and what is said of the rest."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from runbook.folder.launch.documents import read_console, read_json_object, read_junit

MIB = 1 << 20


@pytest.mark.parametrize(("more", "found"), [(0, {"a": 1}), (1, None)])
def test_a_document_of_up_to_64_mib_is_read(
    tmp_path: Path, more: int, found: dict[str, int] | None
) -> None:
    path = tmp_path / "env.json"
    path.write_bytes(b'{"a": 1}'.ljust(64 * MIB + more))
    problems: list[str] = []
    document, sha256 = read_json_object(path, problems)
    assert document == found
    assert sha256 == ("" if more else hashlib.sha256(path.read_bytes()).hexdigest())
    said = f"env.json has {64 * MIB + 1} bytes, at most {64 * MIB} are read"
    assert problems == ([said] if more else [])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[1]", "x.json does not hold a JSON object"),
        ("{", "x.json is not JSON: Expecting"),
        ("[" * 100_000, "x.json is not JSON: "),
    ],
)
def test_what_is_no_json_object_is_named_and_has_its_digest(
    tmp_path: Path, text: str, says: str
) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    problems: list[str] = []
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    assert read_json_object(path, problems) == (None, sha256)
    assert len(problems) == 1 and problems[0].startswith(says)
    assert read_json_object(tmp_path / "none.json", problems) == (None, "")
    assert len(problems) == 1


@pytest.mark.parametrize(("lines", "left_out"), [(4_001, 0), (8_000, 0), (8_001, 1), (8_003, 3)])
def test_of_a_long_console_the_first_and_the_last_4000_lines_are_kept(
    tmp_path: Path, lines: int, left_out: int
) -> None:
    path = tmp_path / "console.log"
    text = [f"line {number}" for number in range(lines)]
    path.write_text("\n".join(text) + "\r\n")
    kept, sha256 = read_console(path)
    middle = [f"... {left_out} lines left out ..."] if left_out else []
    assert list(kept) == [*text[:4_000], *middle, *text[max(4_000, lines - 4_000) :]]
    assert sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_case_of_junit_says_its_worst_and_why(tmp_path: Path) -> None:
    path = tmp_path / "junit.xml"
    path.write_text(
        """<testsuite><testcase classname="c" name="n"><failure>  trace
        </failure><error message="oh">text</error></testcase>
        <testcase><skipped/><properties><property name="p"/></properties></testcase></testsuite>"""
    )
    problems: list[str] = []
    report = read_junit(path, name="a/junit.xml", problems=problems)
    assert report is not None and problems == []
    assert (report.path, report.sha256) == (
        "a/junit.xml", hashlib.sha256(path.read_bytes()).hexdigest(),
    )  # fmt: skip
    first, second = report.cases
    assert (first.classname, first.name, first.status, first.message) == ("c", "n", "error", "oh")
    assert (second.classname, second.name, second.status, second.message) == ("", "", "skipped", "")
    assert second.properties == {"p": ""}
    path.write_text('<testcase name="n"><failure>  trace </failure></testcase>')
    report = read_junit(path, name="j", problems=problems)
    assert report is not None and report.cases[0].message == "trace"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("<!DOCTYPE x><x/>", "junit.xml declares entities and was not read"),
        ('<!ENTITY a "b">', "junit.xml declares entities and was not read"),
        ("<x>", "junit.xml is not XML: "),
    ],
)
def test_what_is_no_junit_is_named(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "junit.xml"
    path.write_text(text)
    problems: list[str] = []
    assert read_junit(path, name="j", problems=problems) is None
    assert len(problems) == 1 and problems[0].startswith(says)
