"""Changes that `git status` does not show make a checkout dirty all the same, by name."""

from __future__ import annotations

import os
import py_compile
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from runbook.machine import git
from tests.factory import programs


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with a package."""
    programs.git(tmp_path, "init", "-q", "-b", "main")
    (tmp_path / "nsa").mkdir()
    (tmp_path / "nsa" / "__init__.py").write_text("")
    (tmp_path / "nsa" / "layer.py").write_text("SCALE = 1.0\n")
    (tmp_path / "notes.txt").write_text("one\n")
    (tmp_path / "link").symlink_to("notes.txt")
    (tmp_path / ".gitignore").write_text("__pycache__/\nbuild/\n*.log\n")
    programs.git(tmp_path, "add", ".")
    programs.git(tmp_path, "commit", "-qm", "first")
    return tmp_path


def flagged(flag: str) -> Callable[[Path], None]:
    def change(checkout: Path) -> None:
        programs.git(checkout, "update-index", flag, "nsa/layer.py")
        (checkout / "nsa" / "layer.py").write_text("SCALE = 0.0\n")

    return change


def removed(checkout: Path) -> None:
    programs.git(checkout, "update-index", "--skip-worktree", "nsa/layer.py")
    (checkout / "nsa" / "layer.py").unlink()


def with_its_old_time(checkout: Path) -> None:
    """The index remembers size and time; with the change time off it looks at nothing else."""
    path = checkout / "nsa" / "layer.py"
    programs.git(checkout, "config", "core.trustctime", "false")
    programs.git(checkout, "config", "core.checkStat", "minimal")
    os.utime(path, (1e9, 1e9))
    programs.git(checkout, "update-index", "--refresh")
    path.write_text("SCALE = 0.0\n")
    os.utime(path, (1e9, 1e9))


def behind_a_filter(checkout: Path) -> None:
    (checkout / ".git" / "info" / "attributes").write_text("nsa/layer.py filter=old\n")
    programs.git(checkout, "config", "filter.old.clean", "echo 'SCALE = 1.0'")
    (checkout / "nsa" / "layer.py").write_text("SCALE = 0.0\n")


def link(checkout: Path) -> None:
    programs.git(checkout, "update-index", "--assume-unchanged", "link")
    (checkout / "link").unlink()
    (checkout / "link").symlink_to("nsa/layer.py")


def excluded(name: str) -> Callable[[Path], None]:
    def change(checkout: Path) -> None:
        (checkout / ".git" / "info" / "exclude").write_text(f"{name}\n")
        (checkout / name).parent.mkdir(exist_ok=True)
        (checkout / name).write_text("SCALE = 0.0\n")

    return change


def unchecked_cache(checkout: Path) -> None:
    """Python runs this one without a look at its source."""
    other = checkout / "build" / "other.py"
    other.parent.mkdir()
    other.write_text("SCALE = 0.0\n")
    target = checkout / "nsa" / "__pycache__" / "layer.cpython-311.pyc"
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(other), cfile=str(target), invalidation_mode=mode)


HIDDEN: list[tuple[Callable[[Path], None], str]] = [
    (flagged("--skip-worktree"), "nsa/layer.py differs"),
    (flagged("--assume-unchanged"), "nsa/layer.py differs"),
    (removed, "nsa/layer.py is gone"),
    (with_its_old_time, "nsa/layer.py differs"),
    (behind_a_filter, "nsa/layer.py differs"),
    (link, "link differs"),
    (excluded("nsa/torch.py"), "nsa/torch.py is ignored and can be imported"),
    (excluded("nsa/layer/__init__.py"), "nsa/layer/__init__.py is ignored"),
    (excluded("nsa/layer.cpython-311-x86_64-linux-gnu.so"), "is ignored and can be imported"),
    (excluded("sitecustomize.py"), "sitecustomize.py is ignored"),
    (unchecked_cache, "layer.cpython-311.pyc runs whatever its source says"),
]


@pytest.mark.parametrize(("change", "text"), HIDDEN)
def test_what_git_does_not_show_is_dirty_and_named(
    checkout: Path, change: Callable[[Path], None], text: str
) -> None:
    before = git.read_git(checkout)
    assert (before.dirty, before.unseen) == (False, ())
    change(checkout)
    state = git.read_git(checkout)
    assert state.status == "", "git shows it: then this test proves nothing"
    assert state.dirty and len(state.changed) == 1
    assert text in state.changed[0] and "git does not show" in state.changed[0]
    assert state.diff_sha256 != before.diff_sha256


def test_ordinary_ignored_files_flags_and_line_ends_are_clean(checkout: Path) -> None:
    (checkout / "run.log").write_text("x")
    (checkout / "build").mkdir()
    (checkout / "build" / "made.py").write_text("")
    py_compile.compile(str(checkout / "nsa" / "layer.py"))
    programs.git(checkout, "update-index", "--skip-worktree", "nsa/layer.py")
    programs.git(checkout, "config", "core.autocrlf", "true")
    (checkout / "notes.txt").write_bytes(b"one\r\n")
    programs.git(checkout, "add", "notes.txt")
    state = git.read_git(checkout)
    assert not state.dirty, state.changed


def test_a_sparse_checkout_is_clean(checkout: Path) -> None:
    subprocess.run(
        ["git", "-C", str(checkout), "sparse-checkout", "set", "--no-cone", "/nsa/"],
        check=True,
        capture_output=True,
    )
    assert not (checkout / "notes.txt").exists()
    assert not git.read_git(checkout).dirty


def test_a_commit_that_another_was_put_in_the_place_of_is_read_as_it_was(checkout: Path) -> None:
    first = programs.git(checkout, "rev-parse", "HEAD")
    (checkout / "nsa" / "layer.py").write_text("SCALE = 0.0\n")
    programs.git(checkout, "commit", "-qam", "second")
    second = programs.git(checkout, "rev-parse", "HEAD")
    programs.git(checkout, "update-ref", "refs/heads/main", first)
    programs.git(checkout, "replace", first, second)
    assert programs.git(checkout, "status", "--porcelain") == "", "git alone calls it clean"
    state = git.read_git(checkout)
    assert state.sha == first and state.dirty and "+SCALE = 0.0" in state.diff
