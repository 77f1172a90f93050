"""Verify: an untouched run passes, and every edited byte is noticed and named."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from runbook.config.phase import PlanContext
from runbook.engine.verify import Verification, verify_run
from runbook.errors import RunbookError
from runbook.folder.manifest import write_manifest
from runbook.records import Launch, RunRecord
from tests.engine.toys import Toy, run, setup

PHASES = {
    "baseline": Toy("baseline", count=2),
    "bucket_sweep": Toy("bucket_sweep", reads=("baseline",)),
}
FORMATS = ("md", "details", "html", "junit", "terminal")


def verify(folder: Path) -> Verification:
    return verify_run(folder, phases=PHASES, setup=setup(folder.parent, *PHASES.values()))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("verify"), *PHASES.values(), formats=FORMATS)[1]


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / finished.name))


def test_an_untouched_run_is_verified(folder: Path) -> None:
    found = verify(folder)
    assert found.differences == ()
    assert found.checks == 4
    assert found.measurements == 3
    assert set(found.reports) == {
        "report.md",
        "details.md",
        "report.html",
        "report.txt",
        "junit.xml",
    }


def flip(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert data.count(old) >= 1 and len(old) == len(new)
    place = data.rindex(old)
    path.write_bytes(data[:place] + new + data[place + len(old) :])


EDITS: dict[str, Callable[[Path], None]] = {
    "baseline/run1/training.csv": lambda p: flip(p, b"25600.0", b"25600.1"),
    "run.json": lambda p: flip(p, b'"n": 3', b'"n": 4'),
    "report.md": lambda p: flip(p, b"Verdict", b"Verdikt"),
    "details.md": lambda p: flip(p, b"25600", b"25601"),
    "report.html": lambda p: flip(p, b"25600", b"25601"),
    "junit.xml": lambda p: flip(p, b"testcase", b"testcast"),
    "events.jsonl": lambda p: flip(p, b'"n":3', b'"n":4'),
    "baseline/run2/heartbeat_rank1.jsonl": lambda p: flip(p, b"step_end", b"step_and"),
    "baseline/run2/console.log": lambda p: p.write_bytes(b"x"),
    "bucket_sweep/run1/result.json": lambda p: p.unlink(),
    "bucket_sweep/run1/new.csv": lambda p: p.write_text("1\n"),
    "MANIFEST.sha256": lambda p: p.unlink(),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_of_any_file_is_named(folder: Path, name: str) -> None:
    EDITS[name](folder / name)
    found = verify(folder)
    assert not found.ok
    assert any(name in text for text in found.differences)


@pytest.mark.parametrize(
    "name", [name for name in EDITS if "new" not in name and name != "run.json"]
)
def test_a_file_without_an_end_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Each a terabyte of nothing behind what it holds, which would take a day to read."""
    for module in ("folder.launch.lines", "folder.integrity"):
        monkeypatch.setattr(f"runbook.{module}.LARGEST_LOG_BYTES", 1 << 20)
    os.truncate(folder / name, 1 << 40)
    found = verify(folder)
    assert any(name in text for text in found.differences)


@pytest.mark.parametrize("name", ["events.jsonl", "baseline/run1/training.csv", "report.md"])
def test_a_link_that_leads_to_itself_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    (folder / name).symlink_to(Path(name).name)
    assert f"{name}: missing" in verify(folder).differences


@pytest.mark.parametrize(
    ("name", "sign"),
    [
        ("baseline/run1/training.csv", "baseline.rate: measurement.value: recorded 25600"),
        ("run.json", "run.json: phases differ from those in events.jsonl"),
        ("report.md", "report.md: line"),
    ],
)
def test_a_forged_manifest_does_not_help(folder: Path, name: str, sign: str) -> None:
    """Whoever edits a file can also write its new digest; the numbers still do not fit."""
    EDITS[name](folder / name)
    write_manifest(folder)
    differences = verify(folder).differences
    assert any(text.startswith(sign) for text in differences), differences


def test_a_report_of_other_code_is_held_by_its_digest(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upgrade changes the pages and no run; a page may still not tell of another verdict."""
    record, page = folder / "run.json", folder / "report.html"
    said = RunRecord.model_validate_json(record.read_text()).said
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


def test_a_forged_outcome_is_judged_again(folder: Path) -> None:
    """Even with journal, record, reports and manifest all made to fit each other."""
    for name in ("run.json", "events.jsonl"):
        path = folder / name
        path.write_text(path.read_text().replace("all completed", "all is fine!!"))
    write_manifest(folder)
    differences = verify(folder).differences
    assert (
        'baseline.completed: reason: recorded "all is fine!!", recomputed "all completed"'
        in differences
    )


def test_a_byte_changed_anywhere_in_the_decisive_files_is_noticed(folder: Path) -> None:
    for name in ("run.json", "report.md", "baseline/run1/training.csv"):
        path = folder / name
        data = path.read_bytes()
        for place in range(0, len(data), max(1, len(data) // 12)):
            path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
            try:
                assert not verify(folder).ok
            except RunbookError as error:  # no longer a record at all
                assert "run.json" in str(error)
        path.write_bytes(data)


class Careful(Toy):
    """Has one more launch, for the case that the first does not decide; it does."""

    def plan(self, context: PlanContext) -> list[Launch]:
        (first,) = super().plan(context)
        more = {"name": "more", "run_dir": f"{self.name}/more", "conditional": True}
        return [first, first.model_copy(update=more)]


def test_launches_that_were_not_needed_are_no_difference(tmp_path: Path) -> None:
    careful = Careful("baseline")
    _, folder = run(tmp_path, careful)
    found = verify_run(folder, phases={"baseline": careful}, setup=setup(tmp_path, careful))
    assert found.differences == ()
