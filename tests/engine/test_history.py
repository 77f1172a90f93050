"""The history says what the run folders say: runs, those that go on, one number through all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runbook.cli import main
from runbook.folder.journal import Journal, phases_done
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
    """Links to one, and folders in the place of a record, are none."""
    (artifacts / "latest").symlink_to(artifacts / "r3")
    (artifacts / "odd" / "run.json").mkdir(parents=True)
    rows = read_history(artifacts).runs
    assert [(row.run_id, row.verdict, row.passed, row.interrupted) for row in rows] == [
        ("r1", "NO-GO", 2, False),
        ("r2", "INCOMPLETE", 1, True),
        ("r3", "GO", 4, False),
    ]


def test_a_run_that_cannot_be_read_is_listed_with_its_problem(artifacts: Path) -> None:
    (artifacts / "bad").mkdir()
    (artifacts / "bad" / "run.json").write_text('{"verdict": "GO"}')
    row = next(row for row in read_history(artifacts).runs if row.folder == "bad")
    assert row.verdict == ""
    assert row.problem.startswith("run.json is not a run record of this version: tool_version")


def test_the_command_lists_shows(artifacts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(artifacts)]
    assert main(["history", *out]) == 0
    assert "r1   a100x2_pcie4  NO-GO" in capsys.readouterr().out
    assert main(["history", "baseline.throughput", "--json", *out]) == 0
    lines = json.loads(capsys.readouterr().out)["lines"]
    values = {row["run_id"]: row["value"] for line in lines for row in line["rows"]}
    assert values == {"r1": 23.0, "r2": None, "r3": 47.25}
    assert main(["history", "baseline.throughputt", *out]) == 2
    assert "did you mean 'baseline.throughput'" in capsys.readouterr().err


RUN = "20261101T000000Z-abc1234"
SAID = f"{RUN}: RUNNING, 1 of 2 phases, now smoke/run; runbook watch "


@pytest.fixture
def live(tmp_path: Path) -> Path:
    """A run whose record so far lies there already."""
    store(tmp_path, RUN, go())
    with Journal.create(tmp_path / RUN) as journal:
        journal.append("run_started", phases=["preflight", "smoke"])
        journal.append("phase_finished", phase="preflight", interrupted=False)
        journal.append("launch_started", phase="smoke", launch="run")
    return tmp_path


@pytest.mark.parametrize("words", [("report",), ("verify",), ("history",)])
def test_a_run_that_goes_on_is_running_and_no_verdict(
    live: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    with Journal.reopen(live / RUN):
        code = main([*words, "--out", str(live)])
        shown = capsys.readouterr()
    assert "RUNNING" in shown.out and "GO" not in shown.out, shown
    if words != ("history",):
        assert code == 3 and shown.out.startswith(SAID) and len(shown.out.splitlines()) == 1
    main([*words, "--out", str(live)])
    assert "RUNNING" not in capsys.readouterr().out


def test_a_phase_that_is_run_again_is_not_done() -> None:
    begun, done = {"event": "run_started", "phases": ["a", "b"]}, {"event": "phase_finished"}
    assert phases_done([begun, done, done]) == "2 of 2 phases"
    assert phases_done([begun, done, done, {"event": "phase_repeated"}]) == "1 of 2 phases"
