"""What shows what there is: report, export, phases, profiles, toggles; and how a run is found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runbook.cli._runs import find_run
from runbook.config import registry
from runbook.config.load import load_profile, profile_names
from runbook.engine.derive import render
from runbook.errors import RunbookError, UsageError
from runbook.folder.manifest import load_record, record_text, write_manifest
from tests.cli.shell import inside
from tests.frozen import corpus
from tests.reports import samples


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    folder = tmp_path / "artifacts" / "20261121T010203Z-840303b"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(samples.no_go().model_dump_json())
    return folder


def test_a_file_that_changed_since_the_run_is_told(finished: Path, tmp_path: Path) -> None:
    """On stderr: the report says what the record says. A record alone is no change."""
    first, *others = (one.path for one in samples.no_go().artifacts)
    ended = inside("report", cwd=tmp_path)
    assert (ended.code, ended.err, ended.out) == (0, "", render(samples.no_go(), "terminal"))
    (finished / first).parent.mkdir(parents=True, exist_ok=True)
    (finished / first).write_text("edited\n")
    write_manifest(finished)
    ended = inside("report", cwd=tmp_path)
    assert f"changed since the run: {first} and {len(others)} more; see runbook" in ended.err
    assert ended.code == 0 and "changed since the run" not in ended.out
    # What is read through a link is no file of the run, whatever it says.
    (finished / Path(first).parts[0]).rename(tmp_path / "elsewhere")
    (finished / Path(first).parts[0]).symlink_to(tmp_path / "elsewhere")
    for command in ("report", "judge"):
        told = inside(command, cwd=tmp_path).err
        assert f"changed since the run: {Path(first).parts[0]}: a symbolic link; see" in told


def test_a_launch_names_the_newest_checkpoint_of_what_it_trained(tmp_path: Path) -> None:
    launch = corpus.unpack("launch", tmp_path)
    for place in ("extended/run", "production/leg1", "production/leg2"):
        (launch / place / "checkpoints").mkdir(exist_ok=True)
    last, told = launch / "production", "checkpoint  "
    (last / "leg2/checkpoints/.step_120.tmp").mkdir()
    (launch / "extended/run/checkpoints/step_300").mkdir()
    assert told not in inside("report", launch.name, cwd=tmp_path).out
    for name in (
        "leg1/checkpoints/step_50",
        "leg2/checkpoints/step_100",
        "leg2/checkpoints/step_9",
    ):
        (last / name).mkdir()
    named = f"{told}{launch.name}/production/leg2/checkpoints/step_100"
    assert named in inside("report", launch.name, cwd=tmp_path).out.splitlines()


@pytest.mark.parametrize("fmt", registry.names(registry.REPORT_GROUP))
def test_no_format_shows_the_go_that_was_written_into_the_record(
    finished: Path, tmp_path: Path, fmt: str
) -> None:
    """A whole GO of another run, with all that a GO prints: none of it is repeated."""
    write_manifest(finished)
    (finished / "run.json").write_text(record_text(samples.go()))
    ended = inside("report", "--format", fmt, cwd=tmp_path)
    assert ended.code == 3
    assert "run.json is another file than its MANIFEST.sha256 has: nothing in it" in ended.out
    assert "INCOMPLETE" in ended.out and samples.go().headline not in ended.out
    assert "runbook launch" not in ended.out


OLD = "20261120T000000Z-aaaaaaa"


def test_a_run_is_found_by_its_id_or_its_start_its_folder_or_its_record(
    finished: Path, tmp_path: Path
) -> None:
    runs = finished.parent
    (runs / OLD).mkdir()
    (runs / OLD / "run.json").write_text(samples.no_go().model_dump_json())
    (runs / "20269999T000000Z-not-a-run").mkdir()
    (runs / "latest.txt").write_text("x")
    assert find_run("20261120", runs) == find_run(OLD, runs) == runs / OLD
    with pytest.raises(UsageError, match=f"fits several runs in .*: {OLD}, {finished.name}"):
        find_run("2026112", runs)
    elsewhere = tmp_path / "nowhere"
    assert find_run(str(runs / OLD), elsewhere) == runs / OLD
    assert find_run(str(runs / OLD / "run.json"), elsewhere) == runs / OLD
    (runs / OLD / "baseline" / "run1").mkdir(parents=True)
    (runs / "latest").symlink_to(f"{OLD}/baseline/run1")
    assert find_run(str(runs / "latest"), elsewhere) == runs / OLD


@pytest.mark.parametrize("damage", ["{", '{"schema_version": 2}', "\x00"])
def test_a_damaged_record_is_an_error_in_words(finished: Path, damage: str) -> None:
    (finished / "run.json").write_text(damage)
    with pytest.raises(RunbookError, match=r"run\.json is not a run record of this version"):
        load_record(finished)


@pytest.mark.executes("runbook export")
def test_each_format_in_a_file(finished: Path) -> None:
    folder = finished.parents[1]
    (folder / "x.prom").write_text("old")
    old = (folder / "x.prom").stat().st_ino
    for name in ("x.csv", "x.prom"):
        ended = inside("export", "--to", name, cwd=folder)
        assert (ended.code, ended.out) == (0, f"{name}\n")
    assert len((folder / "x.csv").read_text().splitlines()) == 4
    (folder / "x.csv").write_text("old")
    told = json.loads(inside("export", "2026", "--to", "x.csv", "--json", cwd=folder).out)
    assert (told["run_id"], told["written"]) == (samples.no_go().run_id, "x.csv")
    assert (folder / "x.csv").read_text().startswith("run_id,")
    assert 'runbook_verdict{verdict="NO-GO"} 1.0\n' in (folder / "x.prom").read_text()
    # Replaced, not written into: a collector never reads half a file.
    assert (folder / "x.prom").stat().st_ino != old
    assert sorted(path.name for path in folder.iterdir()) == ["artifacts", "x.csv", "x.prom"]


@pytest.mark.executes("runbook phases")
def test_phases_for_machines(tmp_path: Path) -> None:
    rows = json.loads(inside("phases", "--json", cwd=tmp_path).out)["phases"]
    assert [row["name"] for row in rows] == list(registry.phases())
    assert [row["name"] for row in rows if row["optional"]] == ["fineweb", "regression"]
    reads = {row["name"]: row["reads"] for row in rows}
    assert {"bucket_sweep", "fused_adamw"} <= set(reads["long_run"])


def test_profiles_and_the_one_that_auto_takes(tmp_path: Path) -> None:
    ended = inside("profiles", cwd=tmp_path)
    assert ended.code == 0, ended.err
    names = [line.split()[0] for line in ended.out.splitlines()[1:-1]]
    assert names == list(profile_names())
    document = json.loads(inside("profiles", "--json", cwd=tmp_path).out)
    assert [row["name"] for row in document["profiles"]] == names
    chosen = document["auto"]["name"]
    assert ended.out.count("*") == 2
    assert f"{chosen} *" in ended.out
    assert ended.out.endswith(f"* what --profile auto chooses here: {document['auto']['reason']}\n")


def test_a_profile_shows_every_limit_with_its_source(tmp_path: Path) -> None:
    profile = load_profile("a100x2_pcie4")
    ended = inside("profiles", profile.name, cwd=tmp_path)
    for limit_name, limit in profile.limits.items():
        line = next(line for line in ended.out.splitlines() if line.split()[:1] == [limit_name])
        assert f"{limit.value:g}" in line and line.endswith(limit.source)
    for check in profile.required:
        assert f"\n{check}" in ended.out


def test_the_halt_is_told_as_what_watch_does_not_do_by_itself(tmp_path: Path) -> None:
    told = inside("toggles", "NSA_WATCH_HALT", cwd=tmp_path).out
    assert "`runbook watch`: only with --halt, or where this is set" in told


def test_a_default_is_told_as_that_of_who_reads_it(tmp_path: Path) -> None:
    """The profile of a run may have another value."""
    told = inside("toggles", "NSA_DDP_BUCKET_MB", cwd=tmp_path).out
    assert "25              default of the trainer " in told and "may be set by the profile" in told
