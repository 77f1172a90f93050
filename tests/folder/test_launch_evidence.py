"""A whole run directory as evidence: what is absent is None, what is damaged is named."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest

from runbook.folder.launch.documents import read_console, read_json_object, read_junit
from runbook.folder.launch.evidence import read_launch
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
from runbook.records import Launch, LaunchResult, LaunchStatus
from tests.factory import records
from tests.factory.files import heartbeats, training
from tests.tiers import few

RESULT = LaunchResult(status=LaunchStatus.COMPLETED, exit_code=0, run_token="ab12")

JUNIT = """<?xml version="1.0"?><testsuites><testsuite>
<testcase classname="t" name="good" time="0.5"><properties><property name="ratio" value="2.0"/>
</properties></testcase>
<testcase classname="t" name="bad"><failure message="no">trace</failure></testcase>
<testcase classname="t" name="broken"><error message="oh"/></testcase>
<testcase classname="t" name="left"><skipped message="needs CUDA"/></testcase>
</testsuite></testsuites>"""


def launch() -> Launch:
    return records.launch("python", name="base")


def test_earlier_starts_are_found_beside_the_launch_and_beside_its_phase(
    tmp_path: Path, folder: Path
) -> None:
    """The first one ended a step at 2 s of its rank's clock and said its last word at 7 s."""
    for name, at in (("baseline/base.unfinished1", "18"), ("baseline.repeated1/base", "16")):
        aside = tmp_path / name
        aside.mkdir(parents=True)
        (aside / "launch.json").write_text(json.dumps({"started_at": f"2023-11-14T22:13:{at}Z"}))
        (tmp_path / "baseline" / "base2").mkdir(exist_ok=True)
    (aside / "heartbeat_rank0.jsonl").write_text(heartbeats(5))
    first, second = read_launch(tmp_path, launch(), RESULT).aside
    assert (first.folder, first.began) == ("baseline.repeated1/base", 1_699_999_996.0)
    assert (first.first_step, first.ended) == (1_700_000_002.0, 1_700_000_007.0)
    assert (second.first_step, second.ended) == (None, second.began)

    (aside / "launch.json").write_text('{"started_at": "yesterday"}')
    evidence = read_launch(tmp_path, launch(), RESULT)
    assert [one.folder for one in evidence.aside] == ["baseline/base.unfinished1"]
    assert evidence.problems == (
        "baseline.repeated1/base/launch.json: when it was started cannot be read",
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "baseline" / "base"
    path.mkdir(parents=True)
    (path / "training.csv").write_text(training(5))
    for rank in range(2):
        (path / f"heartbeat_rank{rank}.jsonl").write_text(heartbeats(5, rank=rank))
    (path / "env.json").write_text(json.dumps({"world_size": 2}))
    (path / "gates.csv").write_text("step,entropy,max_gate\n1,0.9,0.4\n")
    (path / "console.log").write_text("hello\n[ddp] gradient compression enabled: bf16\n")
    (path / "junit.xml").write_text(JUNIT)
    return path


def test_everything_is_found(tmp_path: Path, folder: Path) -> None:
    evidence = read_launch(tmp_path, launch(), RESULT)
    assert evidence.problems == ()
    assert evidence.training is not None and len(evidence.training.frame) == 5
    assert evidence.training.path == "baseline/base/training.csv"
    assert [rank.rank for rank in evidence.ranks] == [0, 1]
    assert evidence.env == {"world_size": 2}
    assert evidence.path("env") == "baseline/base/env.json"
    assert evidence.gates is not None and evidence.gates["entropy"].tolist() == [0.9]
    assert evidence.console_lines[1].endswith("bf16")
    assert evidence.junit is not None
    assert [case.status for case in evidence.junit.cases] == [
        "passed",
        "failed",
        "error",
        "skipped",
    ]
    assert evidence.junit.cases[0].properties == {"ratio": "2.0"}
    assert evidence.junit.cases[1].message == "no"
    assert not evidence.halted


def test_a_field_of_another_type_is_left_out_and_named(tmp_path: Path, folder: Path) -> None:
    (folder / "env.json").write_text('{"world_size": "two", "config_sha256": "c"}')
    evidence = read_launch(tmp_path, launch(), RESULT)
    assert evidence.env == {"config_sha256": "c"}
    assert evidence.problems == (
        "baseline/base/env.json.world_size has an unexpected value: 'two'",
    )


def test_samples_and_gates_that_are_damaged_name_their_file(tmp_path: Path, folder: Path) -> None:
    (folder / "gates.csv").write_text("step,entropy,max_gate\n1,x,0.4\n")
    (folder / "gpu_samples.csv").write_text("timestamp,index,power_w\na,0,1.5\nb\n")
    evidence = read_launch(tmp_path, launch(), RESULT)
    assert evidence.problems == tuple(
        f"baseline/base/{name}: 1 unreadable rows were dropped"
        for name in ("gates.csv", "gpu_samples.csv")
    )
    assert evidence.gpu_samples is not None
    assert evidence.gpu_samples.to_dict("list") == {
        "timestamp": ["a"], "index": [0], "power_w": [1.5],
    }  # fmt: skip


def test_heartbeats_of_another_launch_are_named(tmp_path: Path, folder: Path) -> None:
    (folder / "heartbeat_rank1.jsonl").write_text(heartbeats(5, rank=1, token="9999"))
    problems = read_launch(tmp_path, launch(), RESULT).problems
    assert problems == ("baseline/base/heartbeat_rank1.jsonl: heartbeats of another launch",)


def test_a_table_of_ours_that_lacks_a_column_is_damaged(tmp_path: Path, folder: Path) -> None:
    """As a record of another version has it."""
    (folder / "resources.csv").write_text("mono,step,rank\n1.0,1,0\n")
    evidence = read_launch(tmp_path, launch(), RESULT)
    (problem,) = evidence.problems
    assert problem.startswith("baseline/base/resources.csv: the header lacks: children, descr")
    assert evidence.resources is not None and evidence.resources.empty


def test_damaged_documents_are_named_and_not_read(tmp_path: Path, folder: Path) -> None:
    (folder / "env.json").write_text('{"world_size":')
    (folder / "sdpa_audit.json").write_text("[]")
    (folder / "junit.xml").write_text('<!DOCTYPE x [<!ENTITY a "b">]><x/>')
    (folder / ".HALT").touch()
    evidence = read_launch(tmp_path, launch(), RESULT)
    assert (evidence.env, evidence.audit, evidence.junit) == (None, None, None)
    assert len(evidence.problems) == 3
    assert evidence.halted


@pytest.mark.parametrize("name", ["env.json", "junit.xml", "gates.csv", "console.log"])
def test_truncation_of_any_file_never_raises(tmp_path: Path, folder: Path, name: str) -> None:
    data = (folder / name).read_bytes()
    for length in few(range(len(data))):
        (folder / name).write_bytes(data[:length])
        evidence = read_launch(tmp_path, launch(), RESULT)
        assert evidence.training is not None and len(evidence.training.frame) == 5


@pytest.mark.parametrize("name", ["devices_before", "devices_after", "kernel_log"])
@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"gpus": 3, "lines": 3}',
        '{"gpus": [{"counters": {"pcie_replays": "many"}}], "lines": [7]}',
        '{"gpus": [{"link": [], "pci": 1}], "lines": {}}',
        '{"gpus": ["x"], "source": 4, "lines": [null]}',
    ],
)
def test_a_malformed_document_of_the_devices_is_a_problem(
    tmp_path: Path, folder: Path, name: str, text: str
) -> None:
    (folder / f"{name}.json").write_text(text)
    evidence = read_launch(tmp_path, launch(), RESULT)
    assert any(f"{name}.json" in problem for problem in evidence.problems)


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
