"""Code that gets in before ours: whose packages are imported, and what runs first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runbook.machine import git
from runbook.machine.identity import startup_code
from runbook.machine.preflight import _git_drafts
from tests.factory import programs

HERE = Path(__file__).resolve().parents[2]


def asked(expression: str, *paths: Path) -> str:
    """What a new interpreter with these on PYTHONPATH says."""
    code = f"from runbook.machine.identity import *; print({expression})"
    path = os.pathsep.join([*map(str, paths), str(HERE)])
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_code_that_runs_at_the_start_of_every_interpreter_is_named(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("FASTER = True\n")
    assert asked("startup_code()", tmp_path) == str([str(tmp_path / "sitecustomize.py")])


def test_a_path_file_that_executes_and_belongs_to_no_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("site.getsitepackages", lambda: [str(tmp_path)])
    (tmp_path / "folders.pth").write_text("/somewhere\n")
    (tmp_path / "owned.pth").write_text("import os\n")
    info = tmp_path / "owned-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: owned\nVersion: 1\n")
    (info / "RECORD").write_text("owned.pth,,\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert startup_code() == []
    (tmp_path / "zz.pth").write_text("import os; os.environ['X'] = '1'\n")
    assert startup_code() == [str(tmp_path / "zz.pth")]


def test_a_package_that_shadows_ours_is_the_one_that_is_told(tmp_path: Path) -> None:
    (tmp_path / "phases").mkdir()
    (tmp_path / "phases" / "__init__.py").write_text("")
    assert asked("package_folders()['phases']", tmp_path) == str(tmp_path / "phases")


def test_a_clean_checkout_that_is_not_what_runs_is_dirty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PYTHONPATH, or another environment's `runbook` in the folder of this checkout."""
    (tmp_path / "nsa").mkdir()
    (tmp_path / "nsa" / "__init__.py").write_text("")
    programs.git(tmp_path, "init", "-q", "-b", "main")
    programs.git(tmp_path, "add", ".")
    programs.git(tmp_path, "commit", "-qm", "first")
    monkeypatch.setattr(git, "find_checkout", lambda: tmp_path)
    (out := tmp_path.with_suffix(".run")).mkdir()
    drafts = {draft.name: draft for draft in _git_drafts(out, None)}
    assert drafts["git.dirty"].value is True
    assert f"nsa is imported from {HERE / 'nsa'}, not from " in drafts["git.dirty"].note
    assert "nsa is imported from" in (out / "git_status.txt").read_text()
