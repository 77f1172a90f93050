"""A bundle is the run, the same bytes each time, and carries no secret and no link."""

from __future__ import annotations

import json
import os
import shutil
import tarfile
from pathlib import Path

import pytest

from runbook.cli import main
from runbook.errors import UsageError
from runbook.folder.manifest import write_manifest
from runbook.records import RunRecord
from runbook.tools.bundle import Bundle, write_bundle
from tests.engine.toys import Toy, run, verify

PHASES = {"baseline": Toy("baseline")}
SECRET = "hf_" + "a1B2c3D4e5F6"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("bundled"), *PHASES.values())[1]


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "out" / finished.name))


def pack(folder: Path, path: Path, *, blank: bool = False) -> Bundle:
    record = RunRecord.model_validate_json((folder / "run.json").read_bytes())
    return write_bundle(record, folder, path, blank=blank)


def differences(folder: Path) -> tuple[str, ...]:
    return verify(folder, *PHASES.values()).differences


def unpacked(path: Path, where: Path) -> Path:
    where.mkdir()
    with tarfile.open(path) as archive:
        archive.extractall(where, filter="data")
    return next(one for one in where.iterdir() if one.is_dir())


def test_unpacked_elsewhere_it_verifies_and_reports(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = pack(folder, tmp_path / "a.tar.gz")
    there = unpacked(made.path, tmp_path / "there")
    assert differences(there) == ()
    assert main(["report", str(there)]) == 0
    assert folder.name in capsys.readouterr().out
    about = json.loads((tmp_path / "there" / f"{folder.name}.bundle.json").read_text())
    names = {path.relative_to(there).as_posix() for path in there.rglob("*") if path.is_file()}
    assert {one["name"] for one in about["files"]} == names


def test_the_largest_files_are_listed_and_the_rest_counted(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(folder), "--to", "bundle", str(tmp_path / "a.tar.gz")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("LARGEST FILES") and len(lines) == 1 + 5 + 1
    assert " files of " in lines[-1]
    assert (
        main(["export", str(folder), "--to", "bundle", str(tmp_path / "b.tar.gz"), "--json"]) == 0
    )
    document = json.loads(capsys.readouterr().out)["exports"][0]["bundle"]
    assert f", {len(document['files'])} files of " in lines[-1] and len(document["files"]) > 5


def test_the_same_run_is_the_same_bytes_for_its_owner_only(folder: Path, tmp_path: Path) -> None:
    first = pack(folder, tmp_path / "a.tar.gz")
    for path in folder.rglob("*"):
        os.utime(path, (1, 1))
    folder.chmod(0o755)
    second = pack(folder, tmp_path / "b.tar.gz")
    assert first.path.read_bytes() == second.path.read_bytes()
    assert first.path.stat().st_mode & 0o777 == 0o600
    with tarfile.open(first.path) as archive:
        members = archive.getmembers()
    assert all(one.isreg() and not one.name.startswith("/") for one in members)
    assert all((one.uid, one.gid, one.uname, one.gname) == (0, 0, "", "") for one in members)
    assert [one.name for one in members] == sorted(one.name for one in members)


def test_a_secret_is_refused_with_its_place_and_nothing_is_written(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (folder / "baseline" / "run1" / "console.log").open("a") as stream:
        stream.write(f"\nlogin with {SECRET}\n")
    lines = (folder / "baseline" / "run1" / "console.log").read_text().splitlines()
    path = tmp_path / "a.tar.gz"
    words = ["export", str(folder), "--to", "bundle", str(path)]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert f"baseline/run1/console.log: line {len(lines)}" in said
    assert SECRET not in said
    assert not path.exists()


def test_a_blanked_secret_is_named_and_verify_names_that_file_only(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = folder / "baseline" / "run1" / "config.txt"
    config.write_text(f"a\npassword at https://me:{SECRET}@host/\n")
    write_manifest(folder)
    path = tmp_path / "a.tar.gz"
    assert main(["export", str(folder), "--to", "bundle", str(path), "--blank-secrets"]) == 0
    assert "blanked  baseline/run1/config.txt: line 2" in capsys.readouterr().out
    there = unpacked(path, tmp_path / "there")
    assert SECRET not in (there / "baseline" / "run1" / "config.txt").read_text()
    before = {text for text in differences(folder) if "config.txt" not in text}
    after = {text for text in differences(there) if "config.txt" not in text}
    assert before == after
    assert any("config.txt: changed" in text for text in differences(there))


def test_links_and_pipes_are_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "baseline" / "passwd").symlink_to("/etc/passwd")
    os.mkfifo(folder / "pipe")
    with pytest.raises(UsageError) as refused:
        pack(folder, tmp_path / "a.tar.gz")
    assert [("passwd" in text, "pipe" in text) for text in refused.value.problems] == [
        (True, False),
        (False, True),
    ]


def test_nothing_is_overwritten_or_written_into_the_run(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    path.write_text("mine")
    dangling = tmp_path / "b.tar.gz"
    dangling.symlink_to(tmp_path / "target")
    for taken in (path, dangling, folder / "c.tar.gz", tmp_path / "none" / "d.tar.gz"):
        with pytest.raises(UsageError):
            pack(folder, taken)
    assert path.read_text() == "mine"
    assert not (tmp_path / "target").exists()


def test_an_unfinished_or_renamed_run_is_refused(folder: Path, tmp_path: Path) -> None:
    other = folder.rename(folder.parent / "another")
    with pytest.raises(UsageError, match="rename it back"):
        pack(other, tmp_path / "a.tar.gz")
    (other / "MANIFEST.sha256").unlink()
    with pytest.raises(UsageError, match="not finished"):
        pack(other, tmp_path / "a.tar.gz")


def test_a_changed_file_is_told_and_still_packed(folder: Path, tmp_path: Path) -> None:
    (folder / "late\nfile.txt").write_text("x")
    made = pack(folder, tmp_path / "a.tar.gz")
    assert made.changed == ("late\nfile.txt: not listed in MANIFEST.sha256",)
    assert (unpacked(made.path, tmp_path / "there") / "late\nfile.txt").read_text() == "x"
