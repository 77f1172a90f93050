"""The history says what the run folders say."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from runbook.cli import main
from runbook.records import RunRecord
from runbook.tools.history import read_history
from tests.reports.samples import go, incomplete, no_go


def store(out_dir: Path, name: str, record: RunRecord, **fields: object) -> Path:
    folder = out_dir / name
    folder.mkdir(parents=True, exist_ok=True)
    changed = record.model_copy(update={"run_id": name, **fields})
    (folder / "run.json").write_text(changed.model_dump_json())
    return folder


@pytest.fixture
def artifacts(tmp_path: Path) -> Path:
    store(tmp_path, "r1", no_go(), started_at="2026-11-19T00:00:00Z")
    store(tmp_path, "r3", go(), started_at="2026-11-21T00:00:00Z")
    store(tmp_path, "r2", incomplete(), started_at="2026-11-20T00:00:00Z")
    return tmp_path


def test_runs_are_listed_oldest_first_with_their_verdicts(artifacts: Path) -> None:
    rows = read_history(artifacts).runs
    assert [(row.run_id, row.verdict, row.passed, row.required) for row in rows] == [
        ("r1", "NO-GO", 2, 4),
        ("r2", "INCOMPLETE", 1, 4),
        ("r3", "GO", 4, 4),
    ]
    assert [row.interrupted for row in rows] == [False, True, False]


def test_a_run_that_cannot_be_read_is_listed_with_its_problem(artifacts: Path) -> None:
    (artifacts / "bad").mkdir()
    (artifacts / "bad" / "run.json").write_text('{"verdict": "GO"}')
    row = next(row for row in read_history(artifacts).runs if row.folder == "bad")
    assert row.verdict == ""
    assert row.problem.startswith("run.json is not a run record of this version: tool_version")


def test_links_and_folders_in_the_place_of_a_record_are_no_runs(artifacts: Path) -> None:
    (artifacts / "latest").symlink_to(artifacts / "r3")
    (artifacts / "odd" / "run.json").mkdir(parents=True)
    assert [row.run_id for row in read_history(artifacts).runs] == ["r1", "r2", "r3"]


def test_the_command_lists_shows_and_exports(
    artifacts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(artifacts)]
    assert main(["history", *out]) == 0
    assert "r1   a100x2_pcie4  NO-GO" in capsys.readouterr().out
    assert main(["history", "baseline.throughput", "--csv", *out]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["value"] for row in rows] == ["23.0", "", "47.25"]
    assert main(["history", "baseline.throughput", "--json", *out]) == 0
    lines = json.loads(capsys.readouterr().out)["lines"]
    assert sum(len(line["rows"]) for line in lines) == 3
    assert main(["history", "baseline.throughputt", *out]) == 2
    assert "did you mean 'baseline.throughput'" in capsys.readouterr().err


def test_a_name_with_a_newline_cannot_fake_a_row(
    artifacts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store(artifacts, "bad\n2026-11-22  fake  cpu  GO", go(), started_at="2026-11-18T00:00:00Z")
    assert main(["history", "--out", str(artifacts)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + 4
