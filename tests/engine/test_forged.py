"""A forger who rewrites record, journal, reports and manifest to fit each other is found out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nsa.contract import sha256_of
from runbook.config.load import load_profile
from runbook.config.registry import report_files
from runbook.engine.derive import derive_record, write_reports
from runbook.engine.intact import profile_problems, unjudged_problems
from runbook.engine.verify import compare_phases
from runbook.errors import RunbookError
from runbook.folder.manifest import artifact_records, record_text, write_manifest
from runbook.records import Mark, PhaseRecord, Reason, RunRecord
from tests.cli.shell import inside
from tests.engine.toys import PHASES, Toy, run, verify
from tests.reports.samples import pictured, series

Document = dict[str, Any]


def differences(folder: Path, fingerprint: str = "") -> tuple[str, ...]:
    return verify(folder, fingerprint=fingerprint).differences


def forge(folder: Path, change: Callable[[Document], None]) -> None:
    """Change run.json, every record of the journal, artifacts, reports and manifest alike."""
    journal, derived = folder / "events.jsonl", ["run.json", "events.jsonl"]
    listed = artifact_records(folder, without=[*derived, *report_files().values()])
    artifacts = [one.model_dump(mode="json") for one in listed]
    events = [json.loads(line) for line in journal.read_text().splitlines()]
    for event in events:
        if event["event"] == "run_started":
            change(event["record"])
        elif event["event"] == "phase_finished":
            change({"phases": [event["record"]]})
        elif event["event"] == "run_finished":
            event["artifacts"] = artifacts
    lines = (json.dumps(e, separators=(",", ":"), ensure_ascii=False) for e in events)
    journal.write_text("".join(f"{line}\n" for line in lines))
    document = json.loads((folder / "run.json").read_text())
    change(document)
    record = RunRecord.model_validate(document | {"artifacts": artifacts})
    (folder / "run.json").write_text(record_text(record))
    write_reports(record, folder)
    write_manifest(folder)


def _set(name: str, value: Any) -> Callable[[Document], None]:
    def change(document: Document) -> None:
        if name in document:
            document[name] = value

    return change


def _phase(change: Callable[[Document], object]) -> Callable[[Document], None]:
    """Changes the phase baseline wherever it is."""

    def every(document: Document) -> None:
        for phase in document["phases"]:
            if phase["name"] == "baseline":
                change(phase)

    return every


def _passed_without_judgement(phase: Document) -> None:
    for check in phase["checks"]:
        check["code"] = "interrupted"


def _launch(name: str, **fields: object) -> Callable[[Document], None]:
    return _phase(lambda phase: phase["launches"][0][name].update(fields))


FORGED: dict[str, tuple[Callable[[Document], None], str]] = {
    "scope": (_set("scope", "2xH200"), 'run.json: scope: recorded "2xH200", recomputed "'),
    "digest of the profile": (_set("profile_sha256", "0" * 64), "run.json: profile_sha256: "),
    "fewer required": (_set("required", ["baseline.rate"]), "run.json: required: recorded"),
    "exports": (
        _set("exports", {"NSA_USE_FA2": "1"}),
        'run.json: exports.NSA_USE_FA2: recorded "1", recomputed null',
    ),
    "passed as interrupted": (_phase(_passed_without_judgement), "not judged, and nothing shows"),
    "passed and never judged": (_phase(lambda phase: phase.update(started_at="")), "baseline"),
    "an end": (_launch("result", duration_s=1.0), "launch run1: result.duration_s: recorded 1.0"),
    "a plan": (_launch("launch", steps=4), "baseline: the launches are not those that the phase"),
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
    kept = sha256_of(finished / "run.json")
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
    sha256 = sha256_of(folder / "host.txt")
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


def test_the_software_of_a_run_is_what_its_launches_ran_on(folder: Path) -> None:
    record = RunRecord.model_validate_json((folder / "run.json").read_text())
    ran = next(one.launch.run_dir for phase in record.phases for one in phase.launches)
    env = {"versions": {"packages": "ab12" * 16}}
    (folder / ran / "env.json").write_text(json.dumps(env))
    for recorded, differ in (("ab12" * 3, 0), ("cd34" * 3, 1)):

        def told(document: Document, packages: str = recorded) -> None:
            if "environment" in document:
                document["environment"]["packages"] = packages

        forge(folder, told)
        found = [one for one in differences(folder) if "environment" in one]
        assert len(found) == differ
    assert found[0].startswith("run.json: environment.packages: recorded 'cd34cd34cd34', ")
    assert f"ran on {'ab12' * 16!r}" in found[0]


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


@pytest.mark.parametrize(
    ("event", "change", "why"),
    [
        ("run_started", {"record": {}}, "tool_version: Field required"),
        ("phase_finished", {}, "it lacks 'record'"),
        ("run_finished", {"artifacts": 5}, "not iterable"),
    ],
)
def test_an_event_that_this_program_never_writes_is_told(
    folder: Path, event: str, change: dict[str, Any], why: str
) -> None:
    path = folder / "events.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    place = next(number for number, one in enumerate(events) if one["event"] == event)
    taken = {name: value for name, value in events[place].items() if name not in ("record",)}
    events[place] = taken | change
    with pytest.raises(RunbookError, match=f"events.jsonl holds an event .*{why}"):
        derive_record(events)
    path.write_text("".join(f"{json.dumps(one)}\n" for one in events))
    ended = inside("run", "--resume", str(folder), "--out", str(folder.parent), cwd=folder.parent)
    assert ended.code == 2 and "internal error" not in ended.err, ended.err


def test_a_phase_that_was_started_and_not_judged_leaves_a_trace(folder: Path) -> None:
    record = RunRecord.model_validate_json((folder / "run.json").read_text())
    (one,) = [phase for phase in record.phases if phase.name == "baseline"]
    cut = one.checks[0].model_copy(update={"code": Reason.HARNESS_ERROR})
    started = one.model_copy(update={"checks": (cut,)})

    def said(interrupted: bool = False, phase: PhaseRecord = started, **known: Toy) -> list[str]:
        update = {"phases": (phase,), "interrupted": interrupted}
        return list(unjudged_problems(record.model_copy(update=update), folder, phases=known))

    assert said(interrupted=True, **PHASES) == []
    assert said(phase=started.model_copy(update={"started_at": ""}), **PHASES) == []
    assert said(**PHASES) == ["baseline: not judged, and nothing shows why"]
    (folder / "harness_error_baseline_1.txt").touch()
    assert said(**PHASES) == []
    assert said() == ["baseline: no phase of this name is installed, so it was not judged again"]


def phase(*, level: float = 2.0, point: float = 3.0) -> PhaseRecord:
    curve = series([1.0, point], limits=[Mark(label="limit", value=level)])
    (made,) = pictured(curves=[curve]).phases
    return made


def test_a_picture_that_was_edited_or_left_out_is_a_difference() -> None:
    assert compare_phases(phase(), phase()) == []
    for edited in (phase(level=9.0), phase(point=9.0)):
        (problem,) = compare_phases(edited, phase())
        assert problem.startswith("sweep: series 'run'")
    none = phase().model_copy(update={"series": ()})
    assert compare_phases(none, phase()) and compare_phases(phase(), none)


@pytest.mark.parametrize(("share", "told"), [(4e-16, 0), (1e-12, 0), (1e-6, 1)])
def test_the_last_digits_are_those_of_the_processor(share: float, told: int) -> None:
    """NumPy's logarithms, exponentials and products round otherwise with AVX-512 and without."""
    assert len(compare_phases(phase(level=2.0 * (1 + share)), phase())) == told
    assert len(compare_phases(phase(point=3.0 * (1 + share)), phase())) == told
