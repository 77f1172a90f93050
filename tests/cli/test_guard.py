"""A folder or distribution that bears one of our packages' names must not run in its place."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import runbook
from runbook.guard import MARKER, PACKAGES, check_packages

HOME = Path(runbook.__file__).resolve().parent.parent


def start(cwd: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, "-m", "runbook", "phases"],
        cwd=cwd,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_packages_of_this_checkout_are_our_own() -> None:
    check_packages()
    for name in PACKAGES:
        assert MARKER in (HOME / name / "__init__.py").read_text(encoding="utf-8")


def test_a_folder_of_that_name_in_the_current_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "phases").mkdir()
    (tmp_path / "phases" / "__init__.py").write_text("raise SystemExit('foreign code ran')\n")
    ended = start(tmp_path)
    assert ended.returncode == 2
    assert ended.stderr.startswith(
        f"runbook: error: package 'phases' comes from {tmp_path}/phases, not from {HOME}; start"
    )
    assert "foreign code ran" not in ended.stderr
    assert start(tmp_path, "-P").returncode == 0, "with -P the folder is not looked at"


def test_pythonpath_is_refused_too(tmp_path: Path) -> None:
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports" / "__init__.py").write_text("")
    ended = start(Path("/"), "-P", PYTHONPATH=str(tmp_path))
    assert ended.returncode == 2
    assert f"package 'reports' comes from {tmp_path}/reports" in ended.stderr


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A stand-in for site-packages: the program's own files, without their heavy parts."""
    for name in ("runbook", *PACKAGES):
        (tmp_path / name).mkdir()
        shutil.copy(HOME / name / "__init__.py", tmp_path / name)
    shutil.copy(HOME / "runbook" / "guard.py", tmp_path / "runbook")
    shutil.copy(HOME / "runbook" / "errors.py", tmp_path / "runbook")
    return tmp_path


def check_in(folder: Path) -> str:
    script = (
        "import sys\n"
        f"sys.path.insert(0, {str(folder)!r})\n"
        "from runbook.guard import check_packages\n"
        "try:\n"
        "    check_packages()\n"
        "except ValueError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True, cwd="/"
    )
    return done.stdout


def test_an_untouched_installation_passes(copied: Path) -> None:
    assert check_in(copied) == ""


def test_a_package_overwritten_by_another_distribution_is_named(copied: Path) -> None:
    (copied / "phases" / "__init__.py").write_text('"""Phases of the moon."""\n')
    assert f"package 'phases' in {copied}/phases was overwritten" in check_in(copied)


def test_a_package_that_lost_its_init_is_named(copied: Path) -> None:
    (copied / "phases" / "__init__.py").unlink()
    # The checkout's own package may still be found behind it; either way it is not ours there.
    assert "package 'phases'" in check_in(copied)


def test_every_shadowed_package_is_in_the_one_message(tmp_path: Path) -> None:
    for name in ("phases", "reports"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    message = start(tmp_path).stderr
    assert "package 'phases'" in message and "package 'reports'" in message
