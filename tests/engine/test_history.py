"""The index says what the run folders say, whatever happened to it."""

from __future__ import annotations

import contextlib
import csv
import fcntl
import io
import json
import multiprocessing
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from runbook.cli import main
from runbook.errors import RunbookError
from runbook.folder.manifest import write_manifest
from runbook.records import RunRecord
from runbook.tools.history.index import FILE_NAME, list_runs, metric_rows, sync
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
    rows = list_runs(artifacts)
    assert [(row.run_id, row.verdict, row.passed, row.required) for row in rows] == [
        ("r1", "NO-GO", 2, 4),
        ("r2", "INCOMPLETE", 1, 4),
        ("r3", "GO", 4, 4),
    ]
    assert [row.interrupted for row in rows] == [False, True, False]


def test_only_what_changed_is_read_again(artifacts: Path) -> None:
    assert sync(artifacts) == 3
    assert sync(artifacts) == 0
    store(artifacts, "r3", no_go())
    store(artifacts, "r4", go())
    assert sync(artifacts) == 2
    assert {row.run_id: row.verdict for row in list_runs(artifacts)}["r3"] == "NO-GO"


def test_a_removed_run_leaves_the_index_with_its_metrics(artifacts: Path) -> None:
    sync(artifacts)
    (artifacts / "r1" / "run.json").unlink()
    assert [row.run_id for row in list_runs(artifacts)] == ["r2", "r3"]
    assert len(metric_rows(artifacts, "baseline.throughput")) == 2


def other_version(path: Path) -> None:
    path.unlink()
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE runs (x)")
        database.execute("PRAGMA user_version = 99")


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b"not a database at all"),
        lambda path: path.write_bytes(b"SQLite format 3\0" + b"x" * 5000),
        other_version,
    ],
)
def test_a_damaged_index_is_made_again(artifacts: Path, damage: Callable[[Path], object]) -> None:
    sync(artifacts)
    damage(artifacts / FILE_NAME)
    assert [row.run_id for row in list_runs(artifacts)] == ["r1", "r2", "r3"]


def test_links_and_folders_in_the_place_of_a_record_are_no_runs(artifacts: Path) -> None:
    (artifacts / "latest").symlink_to(artifacts / "r3")
    (artifacts / "odd" / "run.json").mkdir(parents=True)
    assert [row.run_id for row in list_runs(artifacts)] == ["r1", "r2", "r3"]


def test_a_verdict_that_was_written_into_a_record_is_marked(artifacts: Path) -> None:
    write_manifest(artifacts / "r1")
    assert [row.problem for row in list_runs(artifacts)] == ["", "", ""]
    text = (artifacts / "r1" / "run.json").read_text()
    (artifacts / "r1" / "run.json").write_text(text.replace('"NO-GO"', '"GO"'))
    (first, *_) = list_runs(artifacts)
    assert first.problem == "run.json was changed since the run: see runbook verify"
    assert {row.run_id for row in metric_rows(artifacts, "baseline.throughput")} == {"r2", "r3"}
    (artifacts / "r1" / "MANIFEST.sha256").write_text("no digest\n")
    (artifacts / "r1" / "run.json").write_text(text)
    assert list_runs(artifacts)[0].problem == first.problem


def test_a_run_that_cannot_be_read_is_listed_with_its_problem(artifacts: Path) -> None:
    (artifacts / "bad").mkdir()
    (artifacts / "bad" / "run.json").write_text('{"verdict": "GO"}')
    row = next(row for row in list_runs(artifacts) if row.folder == "bad")
    assert row.verdict == ""
    assert "no record of this version" in row.problem


def test_many_programs_may_record_at_once(tmp_path: Path) -> None:
    for index in range(6):
        store(tmp_path, f"r{index}", go())
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=sync, args=(tmp_path,)) for _ in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 6
    with sqlite3.connect(tmp_path / FILE_NAME) as database:
        assert database.execute("SELECT count(*) FROM runs").fetchone() == (6,)
    database.close()


def test_the_command_lists_shows_and_exports(
    artifacts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(artifacts)]
    assert main(["history", *out]) == 0
    assert "r1   a100x2_pcie4  NO-GO" in capsys.readouterr().out
    assert main(["history", "baseline.throughput", "--csv", *out]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["number"] for row in rows] == ["23.0", "", "47.25"]
    assert main(["history", "baseline.throughput", "--json", *out]) == 0
    lines = json.loads(capsys.readouterr().out)["lines"]
    assert sum(len(line["rows"]) for line in lines) == 3
    assert main(["history", "baseline.throughputt", *out]) == 2
    assert "did you mean 'baseline.throughput'" in capsys.readouterr().err


def test_an_index_that_cannot_be_written_is_an_error_not_silence(
    artifacts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (artifacts / FILE_NAME).mkdir()
    assert main(["history", "--out", str(artifacts)]) == 2
    assert "cannot be used" in capsys.readouterr().err


def test_an_index_that_is_a_link_is_refused_and_its_target_left_alone(
    artifacts: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    target = tmp_path_factory.mktemp("elsewhere") / "precious"
    target.write_text("mine")
    target.chmod(0o644)
    (artifacts / FILE_NAME).symlink_to(target)
    with pytest.raises(RunbookError, match="is a link"):
        list_runs(artifacts)
    assert target.read_text() == "mine"
    assert target.stat().st_mode & 0o777 == 0o644


def test_a_name_with_a_newline_cannot_fake_a_row(
    artifacts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store(artifacts, "bad\n2026-11-22  fake  cpu  GO", go(), started_at="2026-11-18T00:00:00Z")
    assert main(["history", "--out", str(artifacts)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + 4


def test_another_program_that_keeps_the_index_is_named(
    artifacts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runbook.tools.history.index._WAIT_S", 0.1)
    handle = os.open(artifacts, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with pytest.raises(RunbookError, match="another program"):
        list_runs(artifacts)
    os.close(handle)
    assert len(list_runs(artifacts)) == 3
