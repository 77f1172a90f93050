"""The first line of a verdict follows from what ran; what nothing vouches for is not repeated.

The history says what the run folders say, and RUNNING of a run that goes on.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runbook.cli import main
from runbook.config.load import load_profile, profile_names
from runbook.config.settings import parse_settings
from runbook.engine.scope import departures, scope_of, what_ran
from runbook.folder.journal import Journal, phases_done
from runbook.folder.launch.shapes import ENV, shaped
from runbook.folder.manifest import write_manifest
from runbook.records import Outcome, PhaseRecord, RunRecord, Verdict
from runbook.records.run import Ran
from runbook.tools.export import read_history
from tests.cli.shell import Ended, inside
from tests.config import cases
from tests.config.test_profiles import written
from tests.factory import records
from tests.frozen import corpus
from tests.phases import builder
from tests.reports.samples import go, incomplete, no_go, run
from tests.shared import once


def verdict_in(report: str) -> str:
    found = re.search(r"^(GO|INCOMPLETE|PARTIAL PASS)\b", report, re.MULTILINE)
    return found[0] if found else ""


def remade(folder: Path) -> None:
    path = folder / "run.json"
    path.write_text(path.read_text().replace('"verdict": "GO"', '"verdict": "PARTIAL PASS"'))
    write_manifest(folder)


def removed(folder: Path) -> None:
    (folder / "MANIFEST.sha256").unlink()


def nonsense(folder: Path) -> None:
    (folder / "MANIFEST.sha256").write_text("no digest\n")


def damaged(folder: Path) -> None:
    path = folder / "events.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"seq":2,', b'"seq":9,'))
    write_manifest(folder)


SPOILED = {
    "edited, with a manifest made anew": (remade, "contradicts its events.jsonl, which gives GO"),
    "without its manifest": (removed, "has no MANIFEST.sha256 beside it (removed, or cut off"),
    "with a manifest of no digests": (nonsense, "is another file than its MANIFEST.sha256 has"),
    "beside a damaged journal": (damaged, "line 2 is damaged or out of order"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_what_nothing_vouches_for_is_told_in_the_place_of_its_verdict(
    folder: Path, name: str
) -> None:
    spoil, why = SPOILED[name]
    spoil(folder)
    out = ("--out", str(folder.parent))
    report = inside("report", *out, cwd=folder.parent)
    assert (report.code, verdict_in(report.out)) == (3, "INCOMPLETE") and why in report.out
    named = "MANIFEST.sha256" if spoil is removed else "run.json"
    assert f"warning: changed since the run: {named}" in report.err
    (_, row) = inside("history", *out, cwd=folder.parent).out.splitlines()
    assert "  INCOMPLETE  " in row and why in row and " GO " not in row and "PASS" not in row
    history = inside("history", "baseline.rate", *out, cwd=folder.parent)
    assert history.code == 2 and "no run has recorded any" in history.err
    export = inside("export", *out, "--to", "csv", "-", cwd=folder.parent)
    assert (export.code, export.out) == (2, "") and why in export.err
    assert f"`runbook verify {folder.name}` names what differs" in export.err
    compared = inside("compare", str(folder), str(folder), cwd=folder.parent)
    assert compared.code == 3 and "NOT COMPARABLE" in compared.out and why in compared.out
    assert f"A  {folder.name}  INCOMPLETE" in compared.out


def alone(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name not in ("run.json", "report.html"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize("change", [lambda _: None, alone])
def test_a_run_as_it_was_and_a_record_sent_on_alone_are_believed(
    folder: Path, change: Callable[[Path], object]
) -> None:
    change(folder)
    report = inside("report", str(folder), cwd=folder.parent)
    assert (report.code, verdict_in(report.out), report.err) == (0, "GO", "")
    (_, row) = inside("history", "--out", str(folder.parent), cwd=folder.parent).out.splitlines()
    assert "  GO  " in row


@pytest.fixture
def real(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of a real run of one phase, which was a PARTIAL PASS."""
    whole = once(tmp_path_factory, "judged", lambda new: corpus.unpack("partial", new))
    return Path(shutil.copytree(whole, tmp_path / whole.name))


@pytest.mark.executes("runbook judge")
def test_limits_that_were_written_into_the_record_give_no_verdict(real: Path) -> None:
    def judged() -> Ended:
        return inside("judge", str(real), cwd=real.parent)

    assert judged().code == 4 and "another file" not in judged().out
    text = (real / "run.json").read_text()
    (real / "run.json").write_text(text.replace('"title": "', '"title": "my ', 1))
    assert judged().code == 3 and "is another file than its MANIFEST.sha256 has" in judged().out
    (real / "MANIFEST.sha256").unlink()
    assert judged().code == 3 and "has no MANIFEST.sha256 beside it" in judged().out


A100 = Ran(
    device="cuda",
    name="NVIDIA A100 80GB PCIe",
    ranks=2,
    parameters=78_404_784,
    seq_len=2048,
    global_batch=2,
    accumulation=2,
    dtype="bf16",
)


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
    cpu = A100.model_copy(update={"device": "cpu", "name": "Xeon", "parameters": 460_000})
    typed = {**record().profile_document, "title": "2xA100 PCIe4"}
    said = scope_of(record(profile_document=typed), [phase(cpu)])
    assert said.startswith("2 ranks on CPU; 0.5M parameters")
    assert "A100" not in said


def test_what_ran_is_read_from_env_json() -> None:
    where = builder.context()
    found = builder.evidence("baseline", where)
    assert what_ran(found) == (A100.model_copy(update={"name": "A100"}),)
    told, _ = shaped({"device": "x", "effective": 3}, ENV, "env.json")
    broken = {name: replace(one, env=told) for name, one in found.launches.items()}
    assert what_ran(replace(found, launches=broken)) == ()


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
