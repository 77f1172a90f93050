"""Branch, commit, and what differs from it, in real checkouts."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import py_compile
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from py_compile import PycInvalidationMode as Mode

import pytest

from runbook.machine import git
from tests.factory import programs


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A checkout with a package."""
    folder = tmp_path / "checkout"
    (folder / "nsa").mkdir(parents=True)
    programs.git(folder, "init", "-q", "-b", "main")
    (folder / "nsa" / "__init__.py").write_text("")
    (folder / "nsa" / "layer.py").write_text("SCALE = 1.0\n")
    (folder / "notes.txt").write_text("one\n")
    (folder / ".gitignore").write_text("__pycache__/\nbuild/\n*.log\n")
    programs.git(folder, "add", ".")
    programs.git(folder, "commit", "-qm", "first")
    return folder


def test_commits_that_the_last_fetch_brought_are_counted(package: Path, tmp_path: Path) -> None:
    """Requirement P1, "freshly fetched": nothing is fetched here, but what is known is told."""
    state = git.read_git(package)
    assert (state.upstream, state.behind) == (None, None)
    mine = tmp_path / "mine"
    programs.git(tmp_path, "clone", "-q", str(package), str(mine))
    assert (git.read_git(mine).upstream, git.read_git(mine).behind) == ("origin/main", 0)
    programs.git(package, "commit", "-q", "--allow-empty", "-m", "second")
    assert git.read_git(mine).behind == 0, "nobody has fetched it"
    programs.git(mine, "fetch", "-q")
    assert git.read_git(mine).behind == 1


def test_a_checkouts_own_settings_start_no_program(package: Path, tmp_path: Path) -> None:
    trap = tmp_path / "trap.sh"
    trap.write_text(f"#!/bin/sh\ntouch {tmp_path}/sprung\n")
    trap.chmod(0o755)
    programs.git(package, "config", "core.fsmonitor", str(trap))
    programs.git(package, "config", "diff.external", str(trap))
    (package / ".gitattributes").write_text("*.txt diff=trap\n")
    programs.git(package, "config", "diff.trap.textconv", str(trap))
    (package / "notes.txt").write_bytes(b"two caf\xe9\n")
    state = git.read_git(package)
    assert state.dirty and "+two" in state.diff
    assert not (tmp_path / "sprung").exists()
    # The trap is a real one: git alone steps into it.
    plain = ["git", "-C", str(package), "diff", "HEAD", "--no-ext-diff", "--no-textconv"]
    diff = subprocess.run(plain, check=True, capture_output=True).stdout
    assert (tmp_path / "sprung").exists()
    assert state.diff_sha256 == hashlib.sha256(diff).hexdigest(), "bytes of any encoding"


def test_from_a_hook_a_clone_leaves_the_checkout_of_the_hook_alone(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hook and `rebase --exec` set GIT_DIR: the clone's checkout moved the HEAD of that one."""
    first = programs.git(package, "rev-parse", "HEAD")
    (package / "notes.txt").write_text("two\n")
    programs.git(package, "commit", "-qam", "second")
    second = programs.git(package, "rev-parse", "HEAD")
    with monkeypatch.context() as hook:
        hook.setenv("GIT_DIR", str(package / ".git"))
        hook.setenv("GIT_INDEX_FILE", str(package / ".git" / "index"))
        assert git.clone_at(package, first, tmp_path / "clone") == ""
        state = git.read_git(tmp_path / "clone")
        assert (state.sha, state.status) == (first, "")
    state = git.read_git(package)
    assert (state.sha, state.branch, state.status) == (second, "main", "")


def test_outside_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git.commit_of(tmp_path) is None
    assert git.read_git(tmp_path).problems


def test_a_checkout_of_another_user_is_refused_by_git_and_told_as_that(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(package)
    assert "belongs to a git checkout" in git.why_no_checkout()
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    monkeypatch.setenv("LANG", "de_DE.UTF-8")
    assert git.find_checkout() is None
    why = git.why_no_checkout()
    assert why.startswith("git refuses ") and "which another user owns" in why
    assert "git config --global --add safe.directory /" in why


def flagged(flag: str) -> Callable[[Path], None]:
    def change(package: Path) -> None:
        programs.git(package, "update-index", flag, "nsa/layer.py")
        (package / "nsa" / "layer.py").write_text("SCALE = 0.0\n")

    return change


def with_its_old_time(package: Path) -> None:
    """The index remembers size and time; with the change time off it looks at nothing else."""
    path = package / "nsa" / "layer.py"
    programs.git(package, "config", "core.trustctime", "false")
    programs.git(package, "config", "core.checkStat", "minimal")
    os.utime(path, (1e9, 1e9))
    programs.git(package, "update-index", "--refresh")
    path.write_text("SCALE = 0.0\n")
    os.utime(path, (1e9, 1e9))


def behind_a_filter(package: Path) -> None:
    (package / ".git" / "info" / "attributes").write_text("nsa/layer.py filter=old\n")
    programs.git(package, "config", "filter.old.clean", "echo 'SCALE = 1.0'")
    (package / "nsa" / "layer.py").write_text("SCALE = 0.0\n")


def excluded(name: str) -> Callable[[Path], None]:
    def change(package: Path) -> None:
        (package / ".git" / "info" / "exclude").write_text(f"{name}\n")
        (package / name).parent.mkdir(exist_ok=True)
        (package / name).write_text("SCALE = 0.0\n")

    return change


def cached(mode: Mode) -> Callable[[Path], None]:
    """Another source's code, which Python takes for the module's: unseen, or by time and size."""

    def change(package: Path) -> None:
        layer, other = package / "nsa" / "layer.py", package / "build" / "layer.py"
        other.parent.mkdir()
        other.write_text(layer.read_text().replace("1.0", "0.0"))
        shutil.copystat(layer, other)
        target = importlib.util.cache_from_source(str(layer))
        py_compile.compile(str(other), cfile=target, invalidation_mode=mode)

    return change


HIDDEN: list[tuple[Callable[[Path], None], str]] = [
    (flagged("--skip-worktree"), "nsa/layer.py differs"),
    (with_its_old_time, "nsa/layer.py differs"),
    (behind_a_filter, "nsa/layer.py differs"),
    (excluded("nsa/torch.py"), "nsa/torch.py is ignored and can be imported"),
    (excluded("nsa/layer.cpython-311-x86_64-linux-gnu.so"), "is ignored and can be imported"),
    (excluded("sitecustomize.py"), "sitecustomize.py is ignored"),
    *(
        (cached(mode), "nsa/layer.py is run from a cache of another source in __pycache__")
        for mode in (Mode.TIMESTAMP, Mode.UNCHECKED_HASH)
    ),
]


@pytest.mark.parametrize(("change", "text"), HIDDEN)
def test_what_git_does_not_show_is_dirty_and_named(
    package: Path, change: Callable[[Path], None], text: str
) -> None:
    before = git.read_git(package)
    assert (before.dirty, before.unseen) == (False, ())
    change(package)
    state = git.read_git(package)
    assert state.status == "", "git shows it: then this test proves nothing"
    assert state.dirty and len(state.changed) == 1
    assert text in state.changed[0] and "git does not show" in state.changed[0]
    assert state.diff_sha256 != before.diff_sha256


def test_ordinary_ignored_files_flags_and_line_ends_are_clean(package: Path) -> None:
    (package / "run.log").write_text("x")
    (package / "build").mkdir()
    (package / "build" / "made.py").write_text("")
    py_compile.compile(str(package / "nsa" / "layer.py"))
    programs.git(package, "update-index", "--skip-worktree", "nsa/layer.py")
    programs.git(package, "config", "core.autocrlf", "true")
    (package / "notes.txt").write_bytes(b"one\r\n")
    programs.git(package, "add", "notes.txt")
    state = git.read_git(package)
    assert not state.dirty, state.changed
    programs.git(package, "sparse-checkout", "set", "--no-cone", "/nsa/")
    assert not (package / "notes.txt").exists() and not git.read_git(package).dirty


def test_a_commit_that_another_was_put_in_the_place_of_is_read_as_it_was(package: Path) -> None:
    first = programs.git(package, "rev-parse", "HEAD")
    (package / "nsa" / "layer.py").write_text("SCALE = 0.0\n")
    programs.git(package, "commit", "-qam", "second")
    second = programs.git(package, "rev-parse", "HEAD")
    programs.git(package, "update-ref", "refs/heads/main", first)
    programs.git(package, "replace", first, second)
    assert programs.git(package, "status", "--porcelain") == "", "git alone calls it clean"
    state = git.read_git(package)
    assert state.sha == first and state.dirty and "+SCALE = 0.0" in state.diff
