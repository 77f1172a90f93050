"""Which earlier runs are taken as accepted, and that a forged, torn or other one never is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from runbook.engine.accepted import keep_accepted
from runbook.engine.outputs import record_text, write_manifest
from runbook.engine.verify import verify_run
from runbook.read.accepted import read_accepted
from runbook.records import RunRecord, Verdict
from runbook.records.evidence import AcceptedRuns
from tests.engine.toys import Toy, run, setup


class Remembering(Toy):
    """A toy that is held against accepted runs."""

    remembers = True


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
    record = RunRecord.model_validate_json((newest / "run.json").read_bytes())
    keep_accepted(newest, "baseline", record.phases[0].launches)
    found = read_accepted(newest, "baseline")
    assert found is not None and not found.problem
    return found


def changed(folder: Path, **fields: object) -> None:
    """run.json changed, with a manifest that fits."""
    record = RunRecord.model_validate_json((folder / "run.json").read_bytes())
    (folder / "run.json").write_text(record_text(record.model_copy(update=fields)))
    write_manifest(folder)


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
    made = setup(tmp_path, *PHASES.values())
    assert verify_run(folder, phases=PHASES, setup=made).differences == ()


def edit(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / name
        path.write_bytes(path.read_bytes().replace(b"0", b"1", 1))

    return change


def linked(folder: Path) -> None:
    path = folder / "baseline" / "run1" / "training.csv"
    away = folder.parent / "away.csv"
    path.rename(away)
    path.symlink_to(away)


def torn(folder: Path) -> None:
    (folder / "MANIFEST.sha256").unlink()


def not_go_by_its_journal(folder: Path) -> None:
    lines = (folder / "events.jsonl").read_text().splitlines(keepends=True)
    (folder / "events.jsonl").write_text("".join(lines[:-2]))
    write_manifest(folder)


def another_csv_with_a_manifest_that_fits(folder: Path) -> None:
    edit("baseline/run1/training.csv")(folder)
    write_manifest(folder)


def renamed(folder: Path) -> None:
    changed(folder, run_id="20000101T000000Z-nogit")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (edit("baseline/run2/training.csv"), "training.csv is not the file of its MANIFEST"),
        (edit("events.jsonl"), "events.jsonl is not the file of its MANIFEST"),
        (another_csv_with_a_manifest_that_fits, "is not the file of its run.json"),
        (linked, "training.csv is a link"),
        (torn, "MANIFEST.sha256 cannot be read"),
        (not_go_by_its_journal, "run.json"),
        (renamed, "its folder is"),
    ],
)
def test_a_run_that_cannot_be_checked_is_not_taken_and_named(
    out: Path, earlier: Path, change: Callable[[Path], None], why: str
) -> None:
    assert [one.run_id for one in looked(out).runs] == [earlier.name]
    change(out / earlier.name)
    found = looked(out)
    assert found.runs == ()
    assert [why in text for text in found.left_out.values()] == [True], found.left_out


@pytest.mark.parametrize("verdict", [Verdict.NO_GO, Verdict.INCOMPLETE])
def test_a_run_that_was_not_go_is_none(out: Path, earlier: Path, verdict: Verdict) -> None:
    changed(out / earlier.name, verdict=verdict)
    found = looked(out)
    assert (found.runs, found.left_out) == ((), {})


def test_what_is_no_run_is_passed_over(out: Path) -> None:
    for name, text in (("1", ""), ("2", "[]"), ("3\n", '{"verdict": "GO"}'), ("4", "{" * 9999)):
        (out / name).mkdir()
        (out / name / "run.json").write_text(text)
    (out / "5").symlink_to(out)
    assert len(looked(out).runs) == 1


def test_a_run_of_other_work_is_named_with_what_is_other(out: Path, earlier: Path) -> None:
    for path in (out / earlier.name / "baseline").glob("*/env.json"):
        path.write_text(path.read_text().replace('"world_size": 2', '"world_size": 4'))
    assert looked(out).left_out == {earlier.name: "world_size: 4, here 2"}


def test_a_record_that_cannot_be_read_may_have_been_go_and_is_named(
    out: Path, earlier: Path
) -> None:
    path = out / earlier.name / "run.json"
    path.write_bytes(path.read_bytes()[:-9])
    assert looked(out).left_out == {earlier.name: "its run.json is no record of this version"}


def test_many_runs_of_a_part_do_not_hide_the_accepted_one(out: Path, earlier: Path) -> None:
    for number in range(250):
        folder = out / f"29991230T000000Z-{number}"
        folder.mkdir()
        (folder / "run.json").write_text('{"verdict": "PARTIAL PASS"}')
    assert [one.run_id for one in looked(out).runs] == [earlier.name]


def test_a_launch_that_differs_in_less_than_its_work_hides_no_accepted_run(
    out: Path, earlier: Path
) -> None:
    """Of one launch alone the driver is known: the floor must not vanish by that."""
    told = '{"driver": "555.1", "gpus": [{"index": 0, "uuid": "GPU-1"}]}'
    path = out / "29991231T000000Z-nogit" / "baseline" / "run2" / "devices_before.json"
    path.write_text(told)
    assert [one.run_id for one in looked(out).runs] == [earlier.name]


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"schema_version": 2}', '{"schema_version": 1, "runs": [{}], "left_out": {}}',
     '{"schema_version": 1, "left_out": {}, "runs": [{"run_id": "a", "run_sha256": "b", '
     '"rates": [NaN], "facts": []}]}'],
)  # fmt: skip
def test_a_damaged_file_holds_no_runs_and_says_so(out: Path, text: str) -> None:
    newest = out / "29991231T000000Z-nogit"
    (newest / "baseline" / "accepted.json").write_text(text)
    found = read_accepted(newest, "baseline")
    assert found is not None and found.problem and found.runs == ()
