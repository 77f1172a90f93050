"""The history says what the run folders say: runs, those that go on, one number through all."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

import pytest

from runbook.cli import main
from runbook.folder.journal import Journal, is_going_on, phases_done
from runbook.records import RunRecord
from runbook.records.run import Ran
from runbook.tools.export import read_history, trends
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


def test_a_name_with_a_newline_cannot_fake_a_row(
    artifacts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store(artifacts, "bad\n2026-11-22  fake  cpu  GO", go(), started_at="2026-11-18T00:00:00Z")
    assert main(["history", "--out", str(artifacts)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + 4


METRIC = "baseline.throughput"
RAN = Ran(
    device="cuda", name="NVIDIA A100 80GB PCIe", ranks=2, parameters=1, seq_len=2048,
    global_batch=2, accumulation=1, dtype="bf16",
)  # fmt: skip


def at(rate: float, ran: Ran = RAN, **fields: object) -> RunRecord:
    """A run whose baseline gave this rate on these devices."""
    record = go()
    phases = []
    for phase in record.phases:
        checks = tuple(
            check.model_copy(
                update={"measurement": check.measurement.model_copy(update={"value": rate})}
            )
            if check.id == METRIC and check.measurement
            else check
            for check in phase.checks
        )
        phases.append(phase.model_copy(update={"checks": checks, "ran": (ran,)}))
    return record.model_copy(update={"phases": tuple(phases), **fields})


def fill(out: Path) -> Path:
    for day, rate in enumerate((40.0, 44.0, 33.0), start=1):
        store(out, f"r{day}", at(rate), started_at=f"2026-11-0{day}T00:00:00Z")
    return out


@pytest.mark.parametrize(
    "other",
    [
        {"profile_sha256": "f" * 64},
        {"settings": {"NSA_DDP_BUCKET_MB": "25"}},
        {"options": {"steps_scale": 0.5}},
        {"ran": RAN.model_copy(update={"name": "NVIDIA H200"})},
        {"ran": RAN.model_copy(update={"seq_len": 128})},
        {"ran": RAN.model_copy(update={"ranks": 1})},
    ],
)
def test_what_is_not_comparable_is_on_a_line_of_its_own(
    tmp_path: Path, other: dict[str, object]
) -> None:
    record = at(900.0, **other)  # type: ignore[arg-type]
    store(fill(tmp_path), "r9", record, started_at="2026-11-09T00:00:00Z")
    found = trends(read_history(tmp_path).metric(METRIC))
    assert [len(trend.rows) for trend in found] == [3, 1]
    assert found[1].changes() == [None]


def test_the_command_tells_the_trend(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(fill(tmp_path))]
    assert main(["history", METRIC, *out]) == 0
    text = capsys.readouterr().out
    assert "33 to 44 tok/s, 3 runs" in text
    assert "-21.4% (median of 2)" in text


RUN = "20261101T000000Z-abc1234"
SAID = f"{RUN}: RUNNING, 1 of 2 phases, now smoke/run; runbook watch "


@pytest.fixture
def live(tmp_path: Path) -> Path:
    """A run whose record so far lies there already."""
    store(tmp_path, RUN, at(40.0))
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


def test_programs_are_told_so_too(live: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Journal.reopen(live / RUN):
        assert main(["verify", "--json", "--out", str(live)]) == 3
        assert json.loads(capsys.readouterr().out)["ok"] is False
        assert main(["report", "--format", "md", "--out", str(live)]) == 3
        shown = capsys.readouterr()
        assert shown.err.startswith(SAID) and shown.out.startswith("# ")
        main(["history", "--json", "--out", str(live)])
        (row,) = json.loads(capsys.readouterr().out)["runs"]
        assert row["verdict"] == "RUNNING"


def test_another_look_at_the_same_time_is_no_run_that_goes_on(live: Path) -> None:
    with (live / RUN / "events.jsonl").open() as look:
        fcntl.flock(look, fcntl.LOCK_SH)
        assert not is_going_on(live / RUN)


def test_a_phase_that_is_run_again_is_not_done() -> None:
    begun, done = {"event": "run_started", "phases": ["a", "b"]}, {"event": "phase_finished"}
    assert phases_done([begun, done, done]) == "2 of 2 phases"
    assert phases_done([begun, done, done, {"event": "phase_repeated"}]) == "1 of 2 phases"
