"""Which earlier runs are taken as accepted, and that a forged, torn or other one never is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from runbook.engine.earlier import keep_accepted
from runbook.folder.facts import read_accepted
from runbook.folder.manifest import load_record, record_text, write_manifest
from runbook.records import Verdict
from runbook.records.evidence import AcceptedRuns
from tests.engine.toys import Toy, run, verify


class Remembering(Toy):
    """A toy that is held against accepted runs."""

    remembers = True


MANIFEST = "MANIFEST.sha256"
PHASES = {"baseline": Remembering("baseline", count=2)}


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was GO; nobody changes it."""
    record, folder = run(tmp_path_factory.mktemp("accepted"), *PHASES.values())
    assert record.verdict is Verdict.GO
    return folder


@pytest.fixture
def out(earlier: Path, tmp_path: Path) -> Path:
    """Runs of an own: the earlier one, and the newest, which looks for accepted ones."""
    shutil.copytree(earlier, tmp_path / earlier.name)
    newest = tmp_path / "29991231T000000Z-nogit"
    shutil.copytree(earlier, newest)
    (newest / "baseline" / "accepted.json").unlink()
    return tmp_path


def looked(out: Path) -> AcceptedRuns:
    newest = out / "29991231T000000Z-nogit"
    record = load_record(newest)
    keep_accepted(newest, "baseline", record.phases[0].launches, profile=record.profile)
    found = read_accepted(newest, "baseline")
    assert found is not None and not found.problem
    return found


def changed(**fields: object) -> Callable[[Path], None]:
    """run.json changed, with a manifest that fits."""

    def change(folder: Path) -> None:
        record = load_record(folder).model_copy(update=fields)
        (folder / "run.json").write_text(record_text(record))
        write_manifest(folder)

    return change


def test_the_first_run_finds_none_and_the_next_one_finds_it(earlier: Path, tmp_path: Path) -> None:
    first = read_accepted(earlier, "baseline")
    assert first is not None and (first.runs, first.left_out) == ((), {})
    shutil.copytree(earlier, tmp_path / earlier.name)
    _, folder = run(tmp_path, *PHASES.values())
    found = read_accepted(folder, "baseline")
    assert found is not None
    assert [one.run_id for one in found.runs] == [earlier.name]
    table = json.loads((earlier / "run.json").read_text())["phases"][0]["tables"][0]
    assert found.runs[0].rates == pytest.approx([row[1] for row in table["rows"]])
    shutil.rmtree(tmp_path / earlier.name)
    assert verify(folder, *PHASES.values()).differences == ()


def test_a_run_is_held_against_none_that_began_later(out: Path, earlier: Path) -> None:
    shutil.copytree(earlier, out / "29991231T000001Z-nogit")
    found = looked(out)
    assert [one.run_id for one in found.runs] == [earlier.name]
    assert (found.left_out, found.damaged) == ({}, {})


def edit(name: str, old: bytes, new: bytes, *, remade: bool = False) -> Callable[[Path], None]:
    """A file changed; remade: with a manifest that fits."""

    def change(folder: Path) -> None:
        path = folder / name
        path.write_bytes(path.read_bytes().replace(old, new, 1))
        if remade:
            write_manifest(folder)

    return change


def of_other_work(launch: str = "run1") -> Callable[[Path], None]:
    """As if it had been another kind of run, which nobody would compare with."""
    return edit(f"baseline/{launch}/env.json", b'"world_size": 2', b'"world_size": 4')


def linked(folder: Path) -> None:
    path = folder / "baseline" / "run1" / "training.csv"
    away = folder.parent / "away.csv"
    path.rename(away)
    path.symlink_to(away)


def gone(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def not_go_by_its_journal(folder: Path) -> None:
    lines = (folder / "events.jsonl").read_text().splitlines(keepends=True)
    (folder / "events.jsonl").write_text("".join(lines[:-2]))
    write_manifest(folder)


DAMAGED: list[tuple[Callable[[Path], object], str]] = [
    (gone("baseline/run2/training.csv"), "training.csv is not the file of its MANIFEST"),
    (of_other_work(), "env.json is not the file of its MANIFEST"),
    (
        edit("baseline/run1/training.csv", b"0", b"1", remade=True),
        "is not the file of its run.json",
    ),
    (linked, "training.csv is a link"),
    (gone(MANIFEST), "it has no MANIFEST.sha256"),
    (lambda folder: (folder / "MANIFEST.sha256").write_text("x\n"), "line 1 is no digest"),
    (gone("run.json"), "its run.json is gone"),
    (not_go_by_its_journal, "run.json"),
    (
        changed(run_id="20000101T000000Z-nogit"),
        "its folder was renamed from 20000101T000000Z-nogit",
    ),
]


@pytest.mark.parametrize(("change", "why"), DAMAGED)
def test_a_damaged_run_is_not_taken_and_is_told_apart_from_none(
    out: Path, earlier: Path, change: Callable[[Path], object], why: str
) -> None:
    assert [one.run_id for one in looked(out).runs] == [earlier.name]
    change(out / earlier.name)
    found = looked(out)
    assert (found.runs, found.left_out) == ((), {})
    assert list(found.damaged) == [earlier.name]
    assert why in found.damaged[earlier.name]


def cut_off(folder: Path) -> None:
    changed(verdict=Verdict.INCOMPLETE)(folder)
    gone(MANIFEST)(folder)


def beside_other_work(folder: Path) -> None:
    for launch in ("run1", "run2"):
        of_other_work(launch)(folder.parent / "29991231T000000Z-nogit")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        # Else every version that adds a field would hold back the next run.
        (changed(environment={"code": "older"}), "other code made it, and by this one run.json"),
        (
            edit("run.json", b'"run_id"', b'"id"', remade=True),
            "its run.json is no record of this version",
        ),
        (beside_other_work, "world_size: 2, here 4"),
        (cut_off, None),
        (changed(verdict=Verdict.NO_GO), None),
    ],
)
def test_a_run_that_is_not_taken_and_not_damaged_is_named_if_it_was_go(
    out: Path, earlier: Path, change: Callable[[Path], object], why: str | None
) -> None:
    change(out / earlier.name)
    found = looked(out)
    assert (found.runs, found.damaged) == ((), {})
    assert list(found.left_out) == ([earlier.name] if why else [])
    assert found.left_out.get(earlier.name, "").startswith(why or "")


def test_what_is_no_run_is_passed_over(out: Path) -> None:
    for name, text in (("1", ""), ("2", "[]"), ("3\n", '{"verdict": "GO"}'), ("4", "{" * 9999)):
        (out / name).mkdir()
        (out / name / "run.json").write_text(text)
    (out / "5").symlink_to(out)
    (out / "20000101T000000Z-abc").write_text("no folder")
    found = looked(out)
    assert (len(found.runs), found.left_out, found.damaged) == (1, {}, {})


RATELESS = '{"schema_version": 2, "runs": [{"run_id": "a", "rates": [], "facts": []}]}'


@pytest.mark.parametrize("text", ["", '{"schema_version": 3}', RATELESS])
def test_a_damaged_file_holds_no_runs_and_says_so(out: Path, text: str) -> None:
    newest = out / "29991231T000000Z-nogit"
    (newest / "baseline" / "accepted.json").write_text(text)
    found = read_accepted(newest, "baseline")
    assert found is not None and found.problem and found.runs == ()
