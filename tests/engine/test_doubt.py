"""The first line of a verdict follows from what ran; what nothing vouches for is not repeated.

The history says what the run folders say, and RUNNING of a run that goes on.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runbook.config.load import load_profile, profile_names
from runbook.config.settings import parse_settings
from runbook.engine.scope import departures, scope_of
from runbook.folder import Journal
from runbook.folder.manifest import load_record, write_manifest
from runbook.records import Outcome, PhaseRecord, RunRecord, Verdict
from runbook.records.run import Ran
from runbook.tools.export import read_history
from tests.cli.shell import Ended, inside
from tests.config import cases
from tests.config.test_profiles import written
from tests.engine.test_interrupt_and_resume import digests
from tests.engine.toys import PHASES, resume
from tests.factory import records
from tests.frozen import corpus
from tests.reports.samples import go, incomplete, no_go, run


def remade(folder: Path) -> None:
    path = folder / "run.json"
    path.write_text(path.read_text().replace('"verdict": "GO"', '"verdict": "PARTIAL PASS"'))
    write_manifest(folder)


def damaged(folder: Path) -> None:
    path = folder / "events.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"seq":2,', b'"seq":9,'))
    write_manifest(folder)


def cut(folder: Path) -> None:
    """Less than its last line is lost, so that what is left gives the same verdict."""
    path = folder / "events.jsonl"
    path.write_bytes(path.read_bytes()[:-2])


def halved(folder: Path, name: str = "events.jsonl") -> None:
    path = folder / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


LIST = "MANIFEST.sha256"
ANOTHER = "lies beside another events.jsonl than its MANIFEST.sha256 has"


@pytest.mark.parametrize(("spoil", "why"), [
    pytest.param(remade, "contradicts its events.jsonl, which gives GO", id="edited"),
    pytest.param(lambda run: (run / LIST).unlink(), "has no MANIFEST.sha256 beside it",
                 id="no manifest"),
    pytest.param(lambda run: (run / LIST).write_text("no\n"), "is another file than its MANIFEST",
                 id="no digests"),
    pytest.param(cut, ANOTHER, id="cut"),
    pytest.param(halved, ANOTHER, id="halved"),
    pytest.param(damaged, "line 2 is damaged or out of order", id="damaged journal"),
    pytest.param(lambda run: (run / "events.jsonl").unlink(),
                 "lies without the events.jsonl that its MANIFEST.sha256 lists", id="no journal"),
])  # fmt: skip
def test_what_nothing_vouches_for_is_told_in_the_place_of_its_verdict(
    folder: Path, spoil: Callable[[Path], object], why: str
) -> None:
    spoil(folder)
    out = ("--out", str(folder.parent))
    report = inside("report", *out, cwd=folder.parent)
    assert report.code == 3 and why in report.out
    assert re.findall(r"^(?:GO|INCOMPLETE|PARTIAL PASS)\b", report.out, re.M) == ["INCOMPLETE"]
    (warning,) = report.err.splitlines()
    assert warning.startswith("runbook: warning: run.json ") and why in warning
    (_, row) = inside("history", *out, cwd=folder.parent).out.splitlines()
    assert "  INCOMPLETE  " in row and why in row and " GO " not in row and "PASS" not in row
    history = inside("history", "baseline.rate", *out, cwd=folder.parent)
    assert history.code == 2 and "no run has recorded any" in history.err
    export = inside("export", *out, "--to", "numbers.csv", cwd=folder.parent)
    assert (export.code, export.out) == (2, "") and why in export.err
    assert not (folder.parent / "numbers.csv").exists()
    assert f"`runbook verify {folder.name}` names what differs" in export.err
    compared = inside("compare", str(folder), str(folder), cwd=folder.parent)
    assert compared.code == 3 and "NOT COMPARABLE" in compared.out and why in compared.out
    assert f"A  {folder.name}  INCOMPLETE" in compared.out


@pytest.mark.parametrize(("spoil", "why"), [
    pytest.param(cut, ANOTHER, id="cut"),
    pytest.param(halved, ANOTHER, id="halved"),
    pytest.param(lambda run: halved(run, LIST), "is another file than its MANIFEST.sha256 has",
                 id="halved manifest"),
])  # fmt: skip
def test_what_was_damaged_since_it_ended_is_not_gone_on_with(
    folder: Path, spoil: Callable[[Path], object], why: str
) -> None:
    spoil(folder)
    folder = shutil.copytree(folder, folder.parent / "artifacts" / folder.name)
    before = digests(folder)
    told = inside(cwd=folder.parents[1]).out
    assert why in told and "not finished" not in told and "--resume" not in told
    refused = inside("run", "--resume", folder.name, cwd=folder.parents[1])
    assert refused.code == 2 and f"not what it was when it ended: its run.json {why}" in refused.err
    assert "`runbook verify` names every file: put it back from a copy, or" in refused.err
    assert digests(folder) == before


def test_a_run_that_lost_its_record_is_told_so(folder: Path) -> None:
    (folder / "run.json").unlink()
    by_id = ["verify", folder.name[:15], "--out", str(folder.parent)]
    for command in (["report", str(folder)], ["verify", folder.name], by_id):
        told = inside(*command, cwd=folder.parent)
        assert told.code == 2 and f"{folder.name} has lost its run.json" in told.err
        assert "put it back from a copy" in told.err
    (_, row) = inside("history", "--out", str(folder.parent), cwd=folder.parent).out.splitlines()
    assert folder.name in row and "run.json cannot be read: No such file" in row


def test_a_record_that_cannot_be_read_is_written_anew_as_it_says(folder: Path) -> None:
    first, manifest = load_record(folder), (folder / LIST).read_bytes()

    def said() -> str:
        told = inside("verify", folder.name, "--out", ".", cwd=folder.parent)
        assert told.code == 2 and "run.json is not a run record of this version" in told.err
        return told.err

    halved(folder, "run.json")
    line = f"`runbook run --resume {folder.name}` writes it anew from the journal"
    assert f"put it back from a copy, or move its {LIST} elsewhere, then {line}" in said()
    (folder / LIST).unlink()
    assert f"put it back from a copy, or {line}" in said()
    assert resume(folder, *PHASES.values()) == load_record(folder) == first
    assert (folder / LIST).read_bytes() == manifest
    halved(folder, "run.json")
    cut(folder)
    assert "put it back from a copy, or begin a new run" in said()
    write_manifest(folder)
    assert "it is as its run ended: read it with the version that wrote it" in said()


def test_a_record_that_was_sent_on_alone_is_believed(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name not in ("run.json", "report.html"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    report = inside("report", str(folder), cwd=folder.parent)
    assert (report.code, report.err) == (0, "") and re.search(r"^GO\b", report.out, re.M)
    (_, row) = inside("history", "--out", str(folder.parent), cwd=folder.parent).out.splitlines()
    assert "  GO  " in row


@pytest.mark.executes("runbook judge")
def test_limits_that_were_written_into_the_record_give_no_verdict(tmp_path: Path) -> None:
    real = corpus.unpack("partial", tmp_path)

    def judged() -> Ended:
        return inside("judge", str(real), cwd=real.parent)

    assert judged().code == 4 and "another file" not in judged().out
    text = (real / "run.json").read_text()
    (real / "run.json").write_text(text.replace('"title": "', '"title": "my ', 1))
    assert judged().code == 3 and "is another file than its MANIFEST.sha256 has" in judged().out
    (real / "MANIFEST.sha256").unlink()
    assert judged().code == 3 and "has no MANIFEST.sha256 beside it" in judged().out


def record(profile: str = "a100x2_pcie4", **changed: Any) -> RunRecord:
    found = load_profile(profile)
    told = {
        "profile": found.name,
        "profile_document": found.model_dump(mode="json"),
        "scope": "typed by a person",
        "required": found.required,
        "environment": {"gpu.pcie_gen_max": "4"},
    }
    return run(Verdict.GO, (), **(told | changed))


def phase(*ran: Ran) -> PhaseRecord:
    return records.phase("baseline", outcome=Outcome.PASS, ran=ran)


def test_a_gpu_profile_whose_launches_ran_on_the_cpu_says_cpu() -> None:
    shape = {"seq_len": 2048, "global_batch": 2, "accumulation": 2, "dtype": "bf16"}
    cpu = Ran(device="cpu", name="Xeon", ranks=2, parameters=460_000, **shape)
    typed = {**record().profile_document, "title": "2xA100 PCIe4"}
    said = scope_of(record(profile_document=typed), [phase(cpu)])
    assert said.startswith("2 ranks on CPU; 0.5M parameters") and "A100" not in said


@pytest.mark.parametrize("name", profile_names())
def test_a_shipped_profile_departs_from_nothing(name: str) -> None:
    assert departures(load_profile(name), parse_settings(())) == []


# What a profile has besides `extends: a100x2_pcie4` -> what its first line says.
@pytest.mark.parametrize("case", cases("departures"))
def test_a_profile_that_asks_for_less_says_so(tmp_path: Path, case: str) -> None:
    """Under the shipped profile's own name, and with its title."""
    text, said = case.split(" -> ")
    path = written(tmp_path, f"extends: a100x2_pcie4\n{text}\n")
    found = departures(load_profile(path), parse_settings(()))
    assert found == [said.replace("{n}", str(len(load_profile("a100x2_pcie4").required)))]


def store(out_dir: Path, name: str, record: RunRecord, **fields: object) -> Path:
    folder = out_dir / name
    folder.mkdir(parents=True, exist_ok=True)
    changed = record.model_copy(update={"run_id": name, **fields})
    (folder / "run.json").write_text(changed.model_dump_json())
    return folder


def test_runs_are_listed_oldest_first_with_their_verdicts(tmp_path: Path) -> None:
    """Links to one, and folders in the place of a record, are none; an unreadable one is told."""
    for name, day, made in (("r1", 19, no_go()), ("r3", 21, go()), ("r2", 20, incomplete())):
        store(tmp_path, name, made, started_at=f"2026-11-{day}T00:00:00Z")
    (tmp_path / "latest").symlink_to(tmp_path / "r3")
    (tmp_path / "odd" / "run.json").mkdir(parents=True)
    listed = [(one.run_id, one.verdict, one.passed) for one in read_history(tmp_path)[0]]
    assert listed == [("r1", "NO-GO", 2), ("r2", "INCOMPLETE", 1), ("r3", "GO", 4)]
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "run.json").write_text('{"verdict": "GO"}')
    (bad,) = (row for row in read_history(tmp_path)[0] if row.folder == "bad")
    told = "run.json is not a run record of this version: tool_version"
    assert bad.verdict == "" and bad.problem.startswith(told)
    assert "r1   a100x2_pcie4  NO-GO" in inside("history", "--out", ".", cwd=tmp_path).out
    shown = inside("history", "baseline.throughput", "--json", "--out", ".", cwd=tmp_path)
    values = {row["run_id"]: row["value"] for row in json.loads(shown.out)["rows"]}
    assert (shown.code, values) == (0, {"r1": 23.0, "r2": None, "r3": 47.25})
    told = inside("history", "baseline.throughput", "--out", ".", cwd=tmp_path).out.splitlines()
    assert [line.split()[1:3] for line in told[1:]] == [
        [name, "a100x2_pcie4"] for name in ("r1", "r2", "r3")
    ]
    slip = inside("history", "baseline.throughputt", "--out", ".", cwd=tmp_path)
    assert slip.code == 2 and "did you mean 'baseline.throughput'" in slip.err


RUN = "20261101T000000Z-abc1234"
SAID = f"{RUN}: RUNNING, 1 of 2 phases, now smoke/run; runbook watch "


@pytest.mark.parametrize("command", ["report", "verify", "history"])
def test_a_run_that_goes_on_is_running_and_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Its record so far lies there already."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # it verifies as none: a traceback
    store(tmp_path, RUN, go())
    with Journal.create(tmp_path / RUN) as journal:
        journal.append("run_started", phases=["preflight", "smoke"])
        journal.append("phase_finished", phase="preflight", interrupted=False)
        journal.append("launch_started", phase="smoke", launch="run")
        shown = inside(command, "--out", ".", cwd=tmp_path)
    assert "RUNNING" in shown.out and "GO" not in shown.out, shown
    if command != "history":
        assert shown.code == 3 and shown.out.startswith(SAID) and shown.out.count("\n") == 1
    assert "RUNNING" not in inside(command, "--out", ".", cwd=tmp_path).out
