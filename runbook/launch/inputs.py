"""What a launch is given besides its command: an environment, and a checkout of a commit."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from nsa.contract import RUN_DIR_VARIABLE, RUN_TOKEN_VARIABLE
from nsa.contract.digests import package_digest
from runbook.config.settings import VARIABLE_FAMILIES, is_passed_on, may_be_set
from runbook.errors import RunbookError, UsageError
from runbook.files import make_private_dir, write_atomic
from runbook.folder import CHECKOUT_JSON
from runbook.machine.git import clone_at, find_checkout, read_git

CHECKOUTS = "checkouts"
_PACKAGE = "nsa"


class RefusedError(RunbookError):
    """A launch cannot be had here; the message has the words of who refused it."""


def folder_of(commit: str) -> str:
    """Where the checkout of a commit lies, below the run's folder."""
    return f"{CHECKOUTS}/{commit[:12]}"


def check_out(commit: str, run_root: Path, run_dir: Path) -> Path:
    """The clean checkout of a commit below the run's folder; makes it unless it is there.

    What lies in it now is written into the run directory, where the trainer's own word about what
    it ran is held against it. Raises `RefusedError` if the commit cannot be had.
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
        raise RefusedError(f"commit {commit[:12]} cannot be checked out: there is no repository")
    if folder.exists():
        shutil.rmtree(folder)
    if not folder.parent.is_dir():
        make_private_dir(folder.parent)
    if problem := clone_at(source, commit, folder):
        raise RefusedError(f"commit {commit[:12]} cannot be checked out from {source}: {problem}")
    if not (folder / _PACKAGE / "__init__.py").is_file():
        raise RefusedError(f"commit {commit[:12]} has no package {_PACKAGE}")


def build_environment(
    machine: Mapping[str, str],
    plan: Mapping[str, str],
    *,
    token: str,
    run_dir: Path,
    loopback: bool,
    folder: Path | None = None,
    own: Iterable[str] = (),
    installed: bool = False,
) -> dict[str, str]:
    """The whole environment of one launch.

    `machine` is the harness's own environment, of which only a fixed list is passed on; `plan` is
    what the launch sets. `loopback` keeps gloo's sockets on this machine. The packages of `folder`
    come before all others. `own` are variables of a trainer of one's own, checked in
    its profile. `installed`: nothing is imported from the folder that the launch runs in, where
    somebody's `nsa` or `pytest.py` may lie.

    Raises `UsageError` for a variable that a plan may not set.
    """
    if bad := sorted(name for name in set(plan) - set(own) if not may_be_set(name)):
        raise UsageError(
            [f"a launch may not set {name}" for name in bad],
            hint=f"allowed are {', '.join(VARIABLE_FAMILIES)}",
        )
    environment = {name: value for name, value in machine.items() if is_passed_on(name)}
    environment["PYTHONUNBUFFERED"] = "1"
    # Python's stack for a crash in native code; the trainer's own handler comes much later.
    environment["PYTHONFAULTHANDLER"] = "1"
    if installed:
        environment["PYTHONSAFEPATH"] = "1"
    if loopback:
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    environment.update(plan)
    if folder is not None:
        others = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join([str(folder), *([others] if others else [])])
    environment[RUN_TOKEN_VARIABLE] = token
    environment[RUN_DIR_VARIABLE] = str(run_dir)
    return environment
