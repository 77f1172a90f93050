"""Clean checkouts: of exactly that commit, made again if damaged, gone at the end."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from nsa.contract import package_digest
from runbook.launch import command as commits
from runbook.launch.command import build_environment
from tests.factory.programs import git


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "repository"
    (folder / "nsa").mkdir(parents=True)
    git(folder, "init", "--quiet")
    for text in ("one", "two"):
        (folder / "nsa/__init__.py").write_text(f"NAME = {text!r}\n")
        git(folder, "add", ".")
        git(folder, "commit", "--quiet", "--message", text)
    # Not a checkout of this program: what is tested is whose files lie there afterwards.
    monkeypatch.setattr(commits, "find_checkout", lambda: folder)
    return folder


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run/regression/round01_head"
    folder.mkdir(parents=True)
    return folder


def test_an_older_commit_lies_there_whatever_the_repository_has_now(
    repository: Path, run_dir: Path
) -> None:
    older = git(repository, "rev-parse", "HEAD~1")
    (repository / "nsa/__init__.py").write_text("NAME = 'not committed'\n")
    before = git(repository, "status", "--porcelain")
    folder = commits.check_out(older, run_dir.parents[1], run_dir)
    assert (folder / "nsa/__init__.py").read_text() == "NAME = 'one'\n"
    told = json.loads((run_dir / "checkout.json").read_text())
    assert (told["commit"], told["sha"], told["changed"]) == (older, older, [])
    assert told["sha256"] == package_digest(folder / "nsa")
    assert told["path"] == str(folder / "nsa")
    # Nothing is left in the repository: neither a worktree nor another state.
    assert git(repository, "status", "--porcelain") == before
    assert len(git(repository, "worktree", "list").splitlines()) == 1


def test_no_hook_of_the_repository_runs(repository: Path, run_dir: Path, tmp_path: Path) -> None:
    hook = repository / ".git/hooks/post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    hook.chmod(0o755)
    git(repository, "config", "core.hooksPath", str(hook.parent))
    commits.check_out(git(repository, "rev-parse", "HEAD"), run_dir.parents[1], run_dir)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("damage", ["changed", "hidden", "half"])
def test_what_a_crash_left_is_made_again(repository: Path, run_dir: Path, damage: str) -> None:
    sha, root = git(repository, "rev-parse", "HEAD"), run_dir.parents[1]
    folder = commits.check_out(sha, root, run_dir)
    if damage != "half":
        if damage == "hidden":
            git(folder, "update-index", "--skip-worktree", "nsa/__init__.py")
        (folder / "nsa/__init__.py").write_text("NAME = 'edited'\n")
    else:
        (folder / ".git/HEAD").unlink()
    assert commits.check_out(sha, root, run_dir) == folder
    assert (folder / "nsa/__init__.py").read_text() == "NAME = 'two'\n"
    commits.remove_checkouts(root)
    assert not (root / commits.CHECKOUTS).exists()
    commits.remove_checkouts(root)


def test_a_commit_that_is_not_there_is_told(repository: Path, run_dir: Path) -> None:
    with pytest.raises(commits.RefusedError, match="cannot be checked out from"):
        commits.check_out("f" * 40, run_dir.parents[1], run_dir)


def test_the_packages_of_the_checkout_come_first(tmp_path: Path) -> None:
    machine = {"PYTHONPATH": "/others", "PATH": os.environ["PATH"]}
    environment = build_environment(
        machine, {}, token="t", run_dir=tmp_path, loopback=False, folder=tmp_path / "checkout"
    )
    assert environment["PYTHONPATH"] == f"{tmp_path / 'checkout'}{os.pathsep}/others"


def test_the_digest_is_of_names_and_contents_of_python_files_only(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x")
    first = package_digest(tmp_path)
    (tmp_path / "note.txt").write_text("x")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__/a.pyc").write_text("x")
    assert package_digest(tmp_path) == first
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert package_digest(tmp_path) != first
