"""Verify: an untouched run passes, and every edited byte and every strange entry is named."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from runbook.config.phase import Judgement, PlanContext
from runbook.config.registry import report_files
from runbook.folder.manifest import load_record, write_manifest
from runbook.records import Launch
from runbook.records.evidence import PhaseEvidence
from tests.engine.toys import Toy, run, verify


def test_an_untouched_run_is_verified(folder: Path, tmp_path: Path) -> None:
    """Through a link to its folder, and in a copy of another name, too."""
    (tmp_path / "newest").symlink_to(folder)
    for found in (verify(folder), verify(tmp_path / "newest")):
        assert (found.differences, found.notes) == ((), ())
        assert (found.checks, found.measurements) == (4, 5)
        assert set(found.reports) == {*report_files().values()}
    copy = verify(Path(shutil.copytree(folder, tmp_path / "kept copy")))
    assert copy.ok and copy.notes == (f"the folder is kept copy, its run {folder.name}",)


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
    (ROWS, NUMBER, f"{ROWS}: differs from its digest in run.json"),
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
    for module in ("folder.launch.lines", "folder.manifest"):
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
