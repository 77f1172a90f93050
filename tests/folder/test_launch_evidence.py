"""A whole run directory as evidence: what is absent is None, what is damaged is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runbook.folder.launch.evidence import read_launch
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
