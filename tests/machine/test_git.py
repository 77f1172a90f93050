"""Branch, commit, and what differs from it, in real checkouts."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest

from runbook.machine import git
from tests.factory import programs


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    folder.mkdir()
    programs.git(folder, "init", "-q", "-b", "main")
    (folder / "a.txt").write_text("one\n")
    programs.git(folder, "add", "a.txt")
    programs.git(folder, "commit", "-qm", "first")
    return folder


def test_commits_that_the_last_fetch_brought_are_counted(checkout: Path, tmp_path: Path) -> None:
    """Requirement P1, "freshly fetched": nothing is fetched here, but what is known is told."""
    state = git.read_git(checkout)
    assert (state.upstream, state.behind) == (None, None)
    mine = tmp_path / "mine"
    programs.git(tmp_path, "clone", "-q", str(checkout), str(mine))
    assert (git.read_git(mine).upstream, git.read_git(mine).behind) == ("origin/main", 0)
    programs.git(checkout, "commit", "-q", "--allow-empty", "-m", "second")
    assert git.read_git(mine).behind == 0, "nobody has fetched it"
    programs.git(mine, "fetch", "-q")
    assert git.read_git(mine).behind == 1


def test_a_change_is_dirty_and_has_another_digest(checkout: Path) -> None:
    (checkout / "a.txt").write_text("two\n")
    first = git.read_git(checkout)
    (checkout / "a.txt").write_text("three\n")
    second = git.read_git(checkout)
    assert first.dirty and second.dirty
    assert "+two" in first.diff
    assert len({first.diff_sha256, second.diff_sha256, hashlib.sha256(b"").hexdigest()}) == 3


def test_bytes_of_any_encoding_keep_their_digest(checkout: Path) -> None:
    (checkout / "a.txt").write_bytes(b"caf\xe9\n")
    state = git.read_git(checkout)
    done = subprocess.run(
        ["git", "-C", str(checkout), "diff", "HEAD"], check=True, capture_output=True
    )
    assert state.diff_sha256 == hashlib.sha256(done.stdout).hexdigest()


def test_a_checkouts_own_settings_start_no_program(checkout: Path, tmp_path: Path) -> None:
    trap = tmp_path / "trap.sh"
    trap.write_text(f"#!/bin/sh\ntouch {tmp_path}/sprung\n")
    trap.chmod(0o755)
    programs.git(checkout, "config", "core.fsmonitor", str(trap))
    programs.git(checkout, "config", "diff.external", str(trap))
    (checkout / ".gitattributes").write_text("*.txt diff=trap\n")
    programs.git(checkout, "config", "diff.trap.textconv", str(trap))
    (checkout / "a.txt").write_text("two\n")
    state = git.read_git(checkout)
    assert state.dirty
    assert "+two" in state.diff
    assert not (tmp_path / "sprung").exists()
    # The trap is a real one: git alone steps into it.
    subprocess.run(["git", "-C", str(checkout), "diff", "HEAD"], capture_output=True, check=False)
    assert (tmp_path / "sprung").exists()


def test_from_a_hook_a_clone_leaves_the_checkout_of_the_hook_alone(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hook and `rebase --exec` set GIT_DIR: the clone's checkout moved the HEAD of that one."""
    first = programs.git(checkout, "rev-parse", "HEAD")
    (checkout / "a.txt").write_text("two\n")
    programs.git(checkout, "commit", "-qam", "second")
    second = programs.git(checkout, "rev-parse", "HEAD")
    with monkeypatch.context() as hook:
        hook.setenv("GIT_DIR", str(checkout / ".git"))
        hook.setenv("GIT_INDEX_FILE", str(checkout / ".git" / "index"))
        assert git.clone_at(checkout, first, tmp_path / "clone") == ""
        state = git.read_git(tmp_path / "clone")
        assert (state.sha, state.status) == (first, "")
    state = git.read_git(checkout)
    assert (state.sha, state.branch, state.status) == (second, "main", "")


def test_outside_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git.commit_of(tmp_path) is None
    assert git.read_git(tmp_path).problems


def test_a_checkout_of_another_user_is_refused_by_git_and_told_as_that(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkout)
    assert "belongs to a git checkout" in git.why_no_checkout()
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    monkeypatch.setenv("LANG", "de_DE.UTF-8")
    assert git.find_checkout() is None
    why = git.why_no_checkout()
    assert why.startswith("git refuses ") and "which another user owns" in why
    assert "git config --global --add safe.directory /" in why
