"""Documents of another shape: what is left out, what is said of it, what stays."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import pytest

from runbook.folder.launch.documents import read_console, read_json_object, read_junit
from runbook.folder.launch.shapes import (
    EVENTS,
    Each,
    Fields,
    Items,
    is_count,
    is_number,
    is_text,
    shaped,
)

SHAPE = Fields({"n": is_count, "deep": Fields({"t": is_text}), "each": Each(is_number),
                "items": Items(is_text)})  # fmt: skip


@pytest.mark.parametrize(
    ("bad", "kept", "says"),
    [
        ({"n": "1", "m": 2}, {"m": 2}, ["d.n has an unexpected value: '1'"]),
        ({"deep": [1]}, {}, ["d.deep has an unexpected value: '[1]'"]),
        ({"deep": {"t": 1, "u": 2}}, {"deep": {"u": 2}}, ["d.deep.t has an unexpected value: '1'"]),
        ({"each": {"a": 1, "b": "x"}}, {}, ["d.each.b has an unexpected value: 'x'"]),
        ({"each": {"a": 1, "b": None}}, {}, ["d.each holds a null"]),
        ({"each": 5}, {}, ["d.each has an unexpected value: '5'"]),
        ({"items": ["x", 1]}, {}, ["d.items has an unexpected value: '1'"]),
        ({"items": ["x", None]}, {}, ["d.items holds a null"]),
        ({"items": "x"}, {}, ["d.items has an unexpected value: 'x'"]),
        ({"n": "y" * 50}, {}, [f"d.n has an unexpected value: {'y' * 40!r}"]),
    ],
)
def test_what_does_not_fit_is_left_out(
    bad: dict[str, Any], kept: dict[str, Any], says: list[str]
) -> None:
    assert shaped(bad, SHAPE, "d") == (kept, says)


@pytest.mark.parametrize(
    ("event", "fields"),
    [
        ("exit", {"updates": [1, 1], "moved": {"a": math.nan}, "largest_lr": 1, "param_hash": "h"}),
        ("proof", {"positions": 8, "missing": [], "wire": "fp32", "loss": math.nan}),
        ("ddp_buckets", {"arm": "25", "sizes_mib": [1.5], "bytes": [9], "last_bytes": [8]}),
        ("exit", {"in_force": {"timeout_s": 9.5, "threads": 1, "cpus": 2, "variables": {}}}),
        ("halt", {"reason": "asked"}),
        ("nonfinite", {"step": 9}),
    ],
)
def test_a_heartbeat_as_the_trainer_writes_it_fits(event: str, fields: dict[str, Any]) -> None:
    assert shaped(fields, EVENTS[event], event) == (fields, [])
    wrong = dict.fromkeys(fields, object())
    kept, problems = shaped(wrong, EVENTS[event], event)
    assert kept == {} and len(problems) == len(fields)


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
