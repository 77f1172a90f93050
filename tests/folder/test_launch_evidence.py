"""A whole run directory as evidence: what is absent is None, what is damaged is named."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from runbook.folder.launch.documents import read_console, read_json_object
from runbook.folder.launch.evidence import read_launch
from runbook.folder.launch.shapes import (
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
from tests.factory.tables import table

RESULT = LaunchResult(status=LaunchStatus.COMPLETED, exit_code=0, run_token="ab12")

JUNIT = """<?xml version="1.0"?><testsuites><testsuite>
<testcase classname="t" name="good" time="0.5"><properties><property name="ratio" value="2.0"/>
</properties></testcase>
<testcase classname="t" name="bad"><failure message="no">trace</failure></testcase>
<testcase classname="t" name="broken"><failure>x</failure><error message="oh"/></testcase>
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


DAMAGED = yaml.safe_load(Path(__file__).with_name("damaged.yaml").read_text("utf-8"))
DEEP = pytest.param("env.json", "[" * 100_000, "env.json is not JSON: ", id="nested")


@pytest.mark.parametrize(("name", "text", "says"), [*DAMAGED, DEEP])
def test_what_is_damaged_is_named_with_its_file_and_not_read(
    tmp_path: Path, folder: Path, name: str, text: str, says: str
) -> None:
    (folder / name).write_text(text)
    evidence = read_launch(tmp_path, launch(), RESULT)
    assert any(name in one and says in one for one in evidence.problems), evidence.problems
    read = {"env.json": (evidence.env or {}).get("world_size"), "junit.xml": evidence.junit}
    assert read.get(name) is None


SHAPE = Fields({"n": is_count, "deep": Fields({"t": is_text}), "each": Each(is_number),
                "items": Items(is_text)})  # fmt: skip


@table(__file__, "shapes")
def test_what_does_not_fit_is_left_out(
    bad: dict[str, Any], kept: dict[str, Any], says: list[str]
) -> None:
    assert shaped(bad, SHAPE, "d") == (kept, says)


def test_a_document_of_up_to_64_mib_is_read(tmp_path: Path) -> None:
    path, most, problems = tmp_path / "env.json", 64 << 20, list[str]()
    path.write_bytes(b'{"a": 1}'.ljust(most))
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    assert read_json_object(path, problems) == ({"a": 1}, sha256)
    os.truncate(path, most + 1)
    assert read_json_object(path, problems) == (None, "")
    assert problems == [f"env.json has {most + 1} bytes, at most {most} are read"]


@pytest.mark.parametrize(("lines", "left_out"), [(8_000, 0), (8_003, 3)])
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
