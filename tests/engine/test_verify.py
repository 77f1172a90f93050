"""Verify: an untouched run passes, and every edited byte and every strange entry is named."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nsa.contract.digests import sha256_of
from runbook.config.load import load_profile
from runbook.config.registry import Judgement, PlanContext, report_files
from runbook.engine.derive import derive_record, write_reports
from runbook.engine.verify import compare_phases, profile_problems
from runbook.errors import RunbookError
from runbook.folder.manifest import artifact_records, load_record, record_text, write_manifest
from runbook.records import Launch, Mark, PhaseRecord, RunRecord
from runbook.records.evidence import PhaseEvidence
from tests.cli.shell import inside
from tests.engine.toys import PHASES, Toy, run, verify
from tests.factory.tables import table
from tests.reports.samples import pictured, series


def test_an_untouched_run_is_verified(folder: Path, tmp_path: Path) -> None:
    """Through a link to its folder, and in a copy of another name, too."""
    (tmp_path / "newest").symlink_to(folder)
    for found in (verify(folder), verify(tmp_path / "newest")):
        assert (found.differences, found.notes) == ((), ())
        assert (found.checks, found.measurements) == (4, 5)
        assert set(found.reports) == {*report_files().values()}
    copy = verify(Path(shutil.copytree(folder, tmp_path / "kept copy")))
    assert copy.ok and copy.notes == (f"its folder was renamed from {folder.name}: rename it back",)


def flip(old: bytes, new: bytes) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        data = path.read_bytes()
        assert data.count(old) >= 1 and len(old) == len(new)
        place = data.rindex(old)
        path.write_bytes(data[:place] + new + data[place + len(old) :])

    return edit


def written(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


def looped(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def moved_and_linked(path: Path) -> None:
    elsewhere = path.parents[3] / "elsewhere"
    shutil.move(path, elsewhere)
    path.symlink_to(elsewhere)


def torn(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b'{"event"')


def twice(path: Path) -> None:
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line + line for line in lines))


RUN1 = "baseline/run1"
ROWS, RESULT = f"{RUN1}/training.csv", f"{RUN1}/result.json"
NUMBER = flip(b"25600.0", b"25600.1")
# What is done to which entry, and what has to be said.
SPOILED: list[tuple[str, Callable[[Path], object], str]] = [
    (ROWS, NUMBER, f"{ROWS}: changed (sha256 "),
    (ROWS, Path.unlink, f"{ROWS}: missing"),
    (ROWS, moved_and_linked, f"{ROWS}: a symbolic link"),
    *((name, looped, f"{name}: missing") for name in ("events.jsonl", ROWS, "report.md")),
    ("run.json", flip(b'"n": 3', b'"n": 4'), "run.json: changed"),
    ("details.md", flip(b"25600", b"25601"), "details.md: line "),
    ("baseline/run2/heartbeat_rank1.jsonl", flip(b"step_end", b"step_and"), "heartbeat_rank1"),
    ("MANIFEST.sha256", Path.unlink, "MANIFEST.sha256: missing"),
    ("MANIFEST.sha256", written(b"\xff\xfe none\n"), "MANIFEST.sha256 cannot be read"),
    ("MANIFEST.sha256", twice, "MANIFEST.sha256: line 2 names "),
    ("events.jsonl", torn, "events.jsonl: torn last line"),
    ("events.jsonl", written(b"{}\n"), "events.jsonl: line 1 is damaged"),
    (RESULT, Path.unlink, "baseline: launch run1: no launch.json or result.json"),
    (RESULT, written(b"[]"), "baseline: launch run1: result.json does not hold a JSON object"),
    ("more.csv", written(b"1\n"), "more.csv: not listed in MANIFEST"),
    ("gone", lambda path: path.symlink_to("nothing"), "gone: a symbolic link"),
    ("baseline/none", Path.mkdir, "baseline/none: an empty folder"),
    ("pipe", os.mkfifo, "pipe: neither a file nor a folder"),
]


@pytest.mark.parametrize(("name", "spoil", "sign"), SPOILED)
def test_what_is_not_as_the_run_left_it_is_named(
    folder: Path, name: str, spoil: Callable[[Path], object], sign: str
) -> None:
    spoil(folder / name)
    found = verify(folder)
    assert any(sign in text for text in found.differences), found.differences


@pytest.mark.parametrize("name", [ROWS, "events.jsonl", "report.html", "MANIFEST.sha256"])
def test_a_file_without_an_end_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Each a terabyte of nothing behind what it holds, which would take a day to read."""
    for module in ("folder.launch", "folder.manifest"):
        monkeypatch.setattr(f"runbook.{module}.LARGEST_LOG_BYTES", 1 << 20)
    os.truncate(folder / name, 1 << 40)
    assert any(name in text for text in verify(folder).differences)


# The same where a manifest that fits was written, as whoever edits a file can do.
REMADE: list[tuple[str, Callable[[Path], object], str]] = [
    (ROWS, NUMBER, "baseline.rate: measurement.value: recorded 25600"),
    ("run.json", flip(b'"n": 3', b'"n": 4'), "run.json: phases differ from those in events.jsonl"),
    ("report.md", flip(b"Verdict", b"Verdikt"), "report.md: line"),
    ("more.csv", written(b"1\n"), "more.csv: not listed in run.json"),
]


@pytest.mark.parametrize(("name", "edit", "sign"), REMADE)
def test_a_forged_manifest_does_not_help(
    folder: Path, name: str, edit: Callable[[Path], object], sign: str
) -> None:
    edit(folder / name)
    write_manifest(folder)
    assert any(text.startswith(sign) for text in verify(folder).differences)


def test_a_report_of_other_code_is_held_by_its_digest(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upgrade changes the pages and no run; a page may still not tell of another verdict."""
    page, said = folder / "report.html", load_record(folder).said
    page.write_text(page.read_text() + "<!-- as an earlier version wrote it -->\n")
    assert any("report.html: changed" in text for text in verify(folder).differences)
    write_manifest(folder)
    assert any("report.html: line" in text for text in verify(folder).differences)
    monkeypatch.setattr("runbook.engine.verify.code_digest", lambda: "another")
    found = verify(folder)
    assert found.ok, found.differences
    assert found.notes == ("report.html: written by other code than this, and held by digest",)
    page.write_text(page.read_text().replace(said, "GO for everything"))
    write_manifest(folder)
    assert any("report.html: line" in text for text in verify(folder).differences)


class WithoutTables(Toy):
    """As a later version, which shows less and says the same."""

    def judge(self, evidence: PhaseEvidence, context: PlanContext) -> Judgement:
        return replace(super().judge(evidence, context), tables=())


def test_what_other_code_shows_is_held_by_the_digest_and_what_it_measured_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = run(tmp_path, Toy("baseline"))[1]
    later = WithoutTables("baseline")
    (problem,) = verify(made, later).differences
    assert problem.startswith("baseline: tables differ")
    monkeypatch.setattr("runbook.engine.verify.code_digest", lambda: "another")
    assert verify(made, later).ok
    flip(b'"value": 1', b'"value": 2')(made / "run.json")
    assert any("value: recorded" in text for text in verify(made, later).differences)


class Searching(Toy):
    """Asks for one launch after the other: the third follows from the second, of four."""

    def plan(self, context: PlanContext) -> list[Launch]:
        (first,) = super().plan(context)
        return [first] + [
            first.model_copy(
                update={"name": name, "run_dir": f"{self.name}/{name}", "conditional": True}
            )
            for name in ("left", "right", "last")
        ]

    def needs_more(self, evidence: PhaseEvidence, context: PlanContext) -> list[str]:
        return ["last"] if "right" in evidence.launches else ["right"]


def test_launches_are_asked_for_one_after_the_other(tmp_path: Path) -> None:
    searching = Searching("baseline")
    record, folder = run(tmp_path, searching)
    (phase,) = (one for one in record.phases if one.name == "baseline")
    assert [one.launch.name for one in phase.launches] == ["run1", "right", "last"]
    assert verify(folder, searching).differences == ()


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
    "an end": (
        _phase(lambda phase: phase["launches"][0]["result"].update(duration_s=1.0)),
        "launch run1: result.duration_s: recorded 1.0",
    ),
    "a plan": (
        _phase(lambda phase: phase["launches"][0]["launch"].update(steps=4)),
        "baseline: the launches are not those that the phase",
    ),
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


def _environment(name: str, value: str) -> Callable[[Document], None]:
    """run.json tells of it."""

    def change(document: Document) -> None:
        if "environment" in document:
            document["environment"][name] = value

    return change


@pytest.mark.parametrize(
    ("read", "kept", "told"),
    [
        ("A100", "as it was", ""),
        ("H200", "as it was", "environment.gpu.names: recorded 'A100', 'H200'"),
        ("A100", "other", "fact gpu.names: host.txt is not the file that it was read from"),
    ],
)
def test_a_fact_is_shown_as_it_was_found(folder: Path, read: str, kept: str, told: str) -> None:
    (folder / "host.txt").write_text("as it was")
    fact = {"name": "gpu.names", "value": read, "path": "host.txt"}
    fact |= {"sha256": sha256_of(folder / "host.txt")}
    (folder / "facts.json").write_text(json.dumps({"gpu.names": fact}))
    (folder / "host.txt").write_text(kept)
    forge(folder, _environment("gpu.names", "A100"))
    found = differences(folder)
    assert any(told in one for one in found) if told else found == ()


@pytest.mark.parametrize(
    ("recorded", "told"), [("ab12" * 3, []), ("cd34" * 3, ["recorded 'cd34cd34cd34', "])]
)
def test_the_software_of_a_run_is_what_its_launches_ran_on(
    folder: Path, recorded: str, told: list[str]
) -> None:
    env = {"versions": {"packages": "ab12" * 16}}
    (folder / "baseline/run1/env.json").write_text(json.dumps(env))
    forge(folder, _environment("packages", recorded))
    found = [one for one in differences(folder) if "environment" in one]
    assert len(found) == len(told)
    for one in found:
        assert one.startswith(f"run.json: environment.packages: {told[0]}")
        assert f"ran on {'ab12' * 16!r}" in one


def test_a_profile_that_only_has_the_name_of_a_shipped_one(finished: Path) -> None:
    record = load_record(finished)
    document = load_profile("cpu").model_dump(mode="json")

    def problems(profile: str = "auto", **changed: object) -> list[str]:
        update = {"profile": "cpu", "options": record.options | {"profile": profile}}
        update |= {"profile_document": document | changed}
        return list(profile_problems(record.model_copy(update=update)))

    assert problems() == []
    easier: Document = {"scope": "2xA100 PCIe4", "required": []}
    found = problems(**easier)
    assert len(found) == 2
    assert all(text.startswith("profile cpu is not the shipped one: ") for text in found)
    assert problems("/home/me/cpu.yaml", **easier) == []


@table(__file__, "strange_events")
def test_an_event_that_this_program_never_writes_is_told(
    folder: Path, event: str, change: Document, why: str
) -> None:
    path = folder / "events.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    (found, *_) = (one for one in events if one["event"] == event)
    found.pop("record", None)
    found |= change
    with pytest.raises(RunbookError, match=f"events.jsonl holds an event .*{why}"):
        derive_record(events)
    path.write_text("".join(f"{json.dumps(one)}\n" for one in events))
    ended = inside("run", "--resume", str(folder), "--out", str(folder.parent), cwd=folder.parent)
    assert ended.code == 2 and "internal error" not in ended.err, ended.err


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
