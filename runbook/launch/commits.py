"""Clean checkouts that launches of a commit run from, and the proof of what lies in them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from nsa.contract import package_digest
from runbook.errors import RunbookError
from runbook.files import make_private_dir, write_atomic
from runbook.folder.names import CHECKOUT_JSON
from runbook.machine.git import clone_at, find_checkout, read_git

CHECKOUTS = "checkouts"
_PACKAGE = "nsa"


class CheckoutError(RunbookError):
    """A commit that cannot be checked out here."""


def folder_of(commit: str) -> str:
    """Where the checkout of a commit lies, below the run's folder."""
    return f"{CHECKOUTS}/{commit[:12]}"


def check_out(commit: str, run_root: Path, run_dir: Path) -> Path:
    """The clean checkout of a commit below the run's folder; makes it unless it is there.

    What lies in it now is written into the run directory, where the trainer's own word about what
    it ran is held against it. Raises `CheckoutError` if the commit cannot be had.
    """
    folder = run_root.resolve() / folder_of(commit)
    if not _is_whole(folder, commit):
        _make(commit, folder)
    state = read_git(folder)
    document = {
        "schema_version": 1,
        "commit": commit,
        "path": str(folder / _PACKAGE),
        "sha": state.sha,
        "changed": state.changed,
        "sha256": package_digest(folder / _PACKAGE),
    }
    write_atomic(run_dir / CHECKOUT_JSON, json.dumps(document, indent=2) + "\n")
    return folder


def remove_checkouts(run_root: Path) -> None:
    """Remove the checkouts of a run, which can be made again from its commits."""
    if (run_root / CHECKOUTS).is_dir():
        shutil.rmtree(run_root / CHECKOUTS)


def _is_whole(folder: Path, commit: str) -> bool:
    """False for what a crash left half made, or what somebody changed."""
    if not folder.is_dir():
        return False
    state = read_git(folder)
    return state.sha == commit and not state.dirty and not state.problems


def _make(commit: str, folder: Path) -> None:
    source = find_checkout()
    if source is None:
        raise CheckoutError(f"commit {commit[:12]} cannot be checked out: there is no repository")
    if folder.exists():
        shutil.rmtree(folder)
    if not folder.parent.is_dir():
        make_private_dir(folder.parent)
    if problem := clone_at(source, commit, folder):
        raise CheckoutError(f"commit {commit[:12]} cannot be checked out from {source}: {problem}")
    if not (folder / _PACKAGE / "__init__.py").is_file():
        raise CheckoutError(f"commit {commit[:12]} has no package {_PACKAGE}")
