"""A checkout that nobody installed runs as it is; files are written whole, folders are private."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from runbook.checkout import HOME, share_packages
from runbook.files import make_private_dir, read_given, typed_here, write_atomic
from tests.factory.programs import program

PARTS = ("nsa", "runbook", "phases", "reports", "templates", "configs")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A second checkout, as far as the program needs one; for reading only."""
    folder = tmp_path_factory.mktemp("checkout")
    for part in PARTS:
        shutil.copytree(HOME / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(HOME / "pyproject.toml", folder)
    return folder


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that is installed, but nothing of ours."""
    folder = tmp_path_factory.mktemp("packages")
    for key in ("purelib", "platlib"):
        for entry in Path(sysconfig.get_path(key)).iterdir():
            ours = entry.name.startswith(("nsa_runbook", "_nsa_runbook", "__editable__"))
            if not ours and entry.name not in PARTS and not (folder / entry.name).exists():
                (folder / entry.name).symlink_to(entry)
    return folder


def start(*words: str, cwd: Path, path: Path) -> subprocess.CompletedProcess[str]:
    """`python3 -m runbook` in `cwd`; -S leaves out the packages that are installed."""
    environ = {**os.environ, "PYTHONPATH": str(path)}
    command = [sys.executable, "-S", "-m", "runbook", *words]
    return subprocess.run(
        command, cwd=cwd, env=environ, capture_output=True, text=True, check=False, timeout=300
    )


def test_a_bare_checkout_has_its_phases_reports_profiles_and_configs(
    copy: Path, packages: Path
) -> None:
    listed = start("phases", cwd=copy, path=packages)
    assert listed.returncode == 0, listed.stderr
    assert "preflight" in listed.stdout and "fineweb" in listed.stdout
    planned = start("run", "--profile", "cpu", "--dry-run", "--json", cwd=copy, path=packages)
    assert planned.returncode == 0, planned.stderr
    assert len(json.loads(planned.stdout)["phases"]) == 9
    assert "configs/cpu_smoke.yaml" in planned.stdout
    refused = start("report", "none", "--format", "no", cwd=copy, path=packages)
    assert refused.returncode == 2
    assert "ctrf, details, github, html, junit, md, nodes, terminal" in refused.stderr


def test_beside_an_installed_one_the_checkout_says_what_runs(copy: Path) -> None:
    """Its own phases, not those of the package that is installed elsewhere."""
    text = (copy / "pyproject.toml").read_text()
    less = copy.parent / "less"
    shutil.copytree(copy, less)
    line = 'fineweb = "phases.fineweb:FineWeb"\n'
    assert line in text
    (less / "pyproject.toml").write_text(text.replace(line, ""))
    command = [sys.executable, "-m", "runbook", "phases"]
    listed = subprocess.run(command, cwd=less, capture_output=True, text=True, check=True)
    assert "long_run" in listed.stdout and "fineweb" not in listed.stdout


@pytest.mark.parametrize(
    ("origin", "installed"),
    [
        ('{"url": "file://HOME", "dir_info": {"editable": true}}', True),
        ('{"url": "file:///elsewhere", "dir_info": {"editable": true}}', False),
        ("", False),
    ],
)
def test_only_its_own_editable_install_makes_it_installed(
    origin: str, installed: bool, copy: Path, packages: Path, tmp_path: Path
) -> None:
    info = tmp_path / "nsa_runbook-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nsa-runbook\nVersion: 0.1.0\n")
    if origin:
        (info / "direct_url.json").write_text(origin.replace("HOME", str(copy)))
    code = "from runbook.checkout import uninstalled; print(uninstalled() is None)"
    path = os.pathsep.join(map(str, (tmp_path, copy, packages)))
    words = [sys.executable, "-S", "-c", code]
    answer = subprocess.check_output(words, cwd=tmp_path, env={"PYTHONPATH": path}, text=True)
    assert answer.strip() == str(installed)


def test_processes_in_any_folder_find_the_same_packages(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(copy.parent)
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": f"wheels{os.pathsep}."}
    share_packages(environ, copy)
    assert environ["PYTHONPATH"].split(os.pathsep) == [
        str(copy),
        str(copy.parent / "wheels"),
        str(copy.parent),
    ]
    command = [sys.executable, "-P", "-c", "import nsa; print(nsa.__file__)"]
    found = subprocess.check_output(command, cwd=tmp_path, env=environ, text=True)
    assert found.strip() == str(copy / "nsa" / "__init__.py")


def test_writing_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_atomic(path, "old")
    write_atomic(path, "new")
    assert path.read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]
    with pytest.raises(OSError):
        write_atomic(tmp_path / "missing" / "x", "text")


def test_folders_are_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o000)
    try:
        make_private_dir(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("a", "a/b")] == [0o700] * 2
    with pytest.raises(FileExistsError):
        make_private_dir(tmp_path / "a" / "b")


def test_a_named_file_is_read_and_what_has_no_end_is_not(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    os.mkfifo(pipe := tmp_path / "pipe")
    assert read_given(tmp_path / "file") == b"x"
    for path, words in ((pipe, "save it as a file"), (Path("/dev/zero"), "save it as a file")):
        with pytest.raises(OSError, match=words):
            read_given(path)
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(OSError):
            read_given(path)


def test_where_the_program_is_not_on_the_path_its_own_is_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("runbook", "other.py"):
        program(tmp_path / "bin" / name, "true")
    monkeypatch.chdir(tmp_path)

    def typed(started: str, path: str) -> str:
        monkeypatch.setenv("PATH", path)
        monkeypatch.setattr(sys, "argv", [started])
        return typed_here()

    assert typed("bin/runbook", "") == "bin/runbook"
    assert typed("bin/runbook", str(tmp_path / "bin")) == typed("bin/other.py", "") == "runbook"
