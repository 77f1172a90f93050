"""A forger who rewrites record, journal, reports and manifest to fit each other is found out."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runbook.config.load import load_profile
from runbook.engine.intact import profile_problems
from runbook.engine.outputs import write_reports
from runbook.engine.verify import Verification, verify_run
from runbook.folder.manifest import record_text, run_files, write_manifest
from runbook.records import RunRecord
from tests.engine.toys import Toy, run, setup

PHASES = {
    "baseline": Toy("baseline", count=2),
    "bucket_sweep": Toy("bucket_sweep", reads=("baseline",)),
}
Document = dict[str, Any]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("forged"), *PHASES.values())[1]


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / finished.name))


def differences(folder: Path, fingerprint: str = "") -> tuple[str, ...]:
    return verify(folder, fingerprint).differences


def verify(folder: Path, fingerprint: str = "") -> Verification:
    made = setup(folder.parent, *PHASES.values())
    return verify_run(folder, fingerprint=fingerprint, phases=PHASES, setup=made)


def forge(folder: Path, change: Callable[[Document], None]) -> None:
    """Change run.json, every record of the journal, artifacts, reports and manifest alike."""
    journal = folder / "events.jsonl"
    events = [json.loads(line) for line in journal.read_text().splitlines()]
    artifacts = {
        path.relative_to(folder).as_posix(): path
        for path in run_files(folder)
        if path.name not in ("run.json", "events.jsonl", "MANIFEST.sha256", "report.md")
    }
    for event in events:
        if event["event"] == "run_started":
            change(event["record"])
        elif event["event"] == "phase_finished":
            whole = {"phases": [event["record"]]}
            change(whole)
        elif event["event"] == "run_finished":
            event["artifacts"] = [_artifact(name, path) for name, path in artifacts.items()]
    journal.write_text(
        "".join(json.dumps(e, separators=(",", ":"), ensure_ascii=False) + "\n" for e in events)
    )
    document = json.loads((folder / "run.json").read_text())
    change(document)
    document["artifacts"] = [_artifact(name, path) for name, path in artifacts.items()]
    record = RunRecord.model_validate(document)
    (folder / "run.json").write_text(record_text(record))
    write_reports(record, folder, ["md"])
    write_manifest(folder)


def _artifact(name: str, path: Path) -> Document:
    data = path.read_bytes()
    return {"path": name, "sha256": hashlib.sha256(data).hexdigest(), "size_bytes": len(data)}


def _set(name: str, value: Any) -> Callable[[Document], None]:
    def change(document: Document) -> None:
        if name in document:
            document[name] = value

    return change


def _phase(change: Callable[[Document], None]) -> Callable[[Document], None]:
    """Changes the phase baseline wherever it is."""

    def every(document: Document) -> None:
        for phase in document["phases"]:
            if phase["name"] == "baseline":
                change(phase)

    return every


def _passed_without_judgement(phase: Document) -> None:
    for check in phase["checks"]:
        check["code"] = "interrupted"


def _never_judged(phase: Document) -> None:
    phase["checks"][0] |= {"outcome": "PASS", "reason": "all went well"}
    phase["started_at"] = ""


def _ended_well(phase: Document) -> None:
    phase["launches"][0]["result"]["duration_s"] = 1.0


def _shorter_plan(phase: Document) -> None:
    phase["launches"][0]["launch"]["steps"] = 4


def _one_launch_less(phase: Document) -> None:
    del phase["launches"][1]


FORGED: dict[str, tuple[Callable[[Document], None], str]] = {
    "scope": (_set("scope", "2xH200"), 'run.json: scope: recorded "2xH200"'),
    "digest of the profile": (_set("profile_sha256", "0" * 64), "run.json: profile_sha256: "),
    "fewer required": (_set("required", ["baseline.rate"]), "run.json: required: recorded"),
    "exports": (_set("exports", {"NSA_USE_FA2": "1"}), "run.json: exports.NSA_USE_FA2"),
    "passed as interrupted": (_phase(_passed_without_judgement), "not judged, and nothing shows"),
    "passed and never judged": (_phase(_never_judged), "baseline"),
    "an end": (_phase(_ended_well), "launch run1: result.duration_s: recorded 1.0"),
    "a plan": (_phase(_shorter_plan), "baseline: the launches are not those that the phase plans"),
    "a launch": (_phase(_one_launch_less), "baseline: the launches are not those"),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forgery_that_fits_itself_does_not_fit_the_artifacts(folder: Path, name: str) -> None:
    change, sign = FORGED[name]
    forge(folder, change)
    found = differences(folder)
    assert any(sign in text for text in found), found


def test_a_run_that_takes_the_place_of_another_has_another_fingerprint(
    finished: Path, tmp_path: Path
) -> None:
    """Nothing in a folder can show that all of it was made anew; what was kept elsewhere can."""
    kept = hashlib.sha256((finished / "run.json").read_bytes()).hexdigest()
    other = run(tmp_path / "other", *PHASES.values())[1]
    folder = tmp_path / finished.name
    shutil.move(other, folder)
    for name in ("run.json", "events.jsonl"):
        text = (folder / name).read_text()
        (folder / name).write_text(text.replace(other.name, finished.name))
    forge(folder, lambda document: None)
    assert differences(folder) == ()
    (found,) = differences(folder, kept)
    assert found.startswith("run.json: fingerprint ") and f"asked for {kept[:32]}:" in found
    assert differences(finished, kept) == differences(finished, kept[:32].upper()) == ()


def _facts(folder: Path, value: str) -> None:
    (folder / "host.txt").write_text("as it was\n")
    sha256 = _artifact("host.txt", folder / "host.txt")["sha256"]
    fact = {"name": "gpu.names", "value": value, "path": "host.txt", "sha256": sha256}
    (folder / "facts.json").write_text(json.dumps({"gpu.names": fact}))


def test_a_fact_is_shown_as_it_was_found(folder: Path) -> None:
    _facts(folder, "A100")

    def shown(document: Document) -> None:
        if "environment" in document:
            document["environment"]["gpu.names"] = "A100"

    forge(folder, shown)
    assert differences(folder) == ()
    _facts(folder, "H200")
    forge(folder, lambda document: None)
    assert any("environment.gpu.names: recorded 'A100', 'H200'" in t for t in differences(folder))
    _facts(folder, "A100")
    (folder / "host.txt").write_text("as it should be\n")
    forge(folder, lambda document: None)
    assert "fact gpu.names: host.txt is not the file that it was read from" in differences(folder)


ENTRIES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a link to a file": (lambda p: (p / "more.csv").symlink_to("/etc/hosts"), "more.csv: a symb"),
    "a link that leads nowhere": (lambda p: (p / "gone").symlink_to("nothing"), "gone: a symbolic"),
    "a link to a folder": (lambda p: (p / "all").symlink_to("/tmp"), "all: a symbolic link"),
    "an empty folder": (lambda p: (p / "baseline/none").mkdir(), "baseline/none: an empty folder"),
    "a pipe": (lambda p: os.mkfifo(p / "pipe"), "pipe: neither a file nor a folder"),
    "a file": (lambda p: (p / "more.csv").write_text("1\n"), "more.csv: not listed in MANIFEST"),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_that_the_run_did_not_make(folder: Path, name: str) -> None:
    make, sign = ENTRIES[name]
    make(folder)
    assert any(sign in text for text in differences(folder))


def test_a_manifest_whose_lines_are_there_twice(folder: Path) -> None:
    path = folder / "MANIFEST.sha256"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line + line for line in lines))
    name = lines[0].split("  ")[1].strip()
    assert any(f"line 2 names {name} again" in text for text in differences(folder))


def test_a_new_file_in_a_new_manifest_is_still_unknown_to_the_record(folder: Path) -> None:
    (folder / "more.csv").write_text("1\n")
    write_manifest(folder)
    assert "more.csv: not listed in run.json" in differences(folder)


def test_a_file_that_became_a_link_to_its_copy(folder: Path, tmp_path: Path) -> None:
    inside = folder / "baseline/run1/training.csv"
    shutil.move(inside, tmp_path / "elsewhere.csv")
    inside.symlink_to(tmp_path / "elsewhere.csv")
    assert "baseline/run1/training.csv: a symbolic link" in differences(folder)


def test_a_folder_of_another_name_is_the_same_evidence(folder: Path) -> None:
    copy = Path(shutil.copytree(folder, folder.with_name("kept copy")))
    found = verify(copy)
    assert found.ok and found.notes == (f"the folder is kept copy, its run {folder.name}",)
    assert verify(folder).notes == ()


def test_a_run_is_verified_through_a_link_to_its_folder(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "newest").symlink_to(folder)
    assert differences(tmp_path / "newest") == ()


def test_a_profile_that_only_has_the_name_of_a_shipped_one(folder: Path) -> None:
    record = RunRecord.model_validate_json((folder / "run.json").read_text())
    document = load_profile("cpu").model_dump(mode="json")
    own = {"profile": "cpu", "options": record.options | {"profile": "auto"}}
    honest = record.model_copy(update=own | {"profile_document": document})
    assert profile_problems(honest) == []
    easier = honest.model_copy(
        update={"profile_document": document | {"scope": "2xA100 PCIe4", "required": []}}
    )
    found = profile_problems(easier)
    assert len(found) == 2
    assert all(text.startswith("profile cpu is not the shipped one: ") for text in found)
    of_a_file = {"options": record.options | {"profile": "/home/me/cpu.yaml"}}
    assert profile_problems(easier.model_copy(update=of_a_file)) == []
