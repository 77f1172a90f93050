"""Which commit is being tested, on which branch, and what was changed since."""

from __future__ import annotations

import hashlib
import importlib.util
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from nsa.contract import GIT_PLACES
from runbook.machine.unseen import Unseen, find_unseen
from runbook.process.start import ToolResult, run_tool

_TIMEOUT_S = 30.0
# A checkout's own configuration may name programs to run: none of these commands may start one.
# An object that another one was put in the place of (git replace) is read as it was committed.
_GIT = ("git", "--no-optional-locks", "--no-pager", "--no-replace-objects", "-c",
        "core.fsmonitor=false")  # fmt: skip
_NO_HOOKS = ("-c", "core.hooksPath=/dev/null")
# What git says of a checkout of another user's, and whose configuration it does not read then.
_REFUSED = re.compile(r"dubious ownership in repository at '([^']+)'")
_DIFF = ("diff", "HEAD", "--no-ext-diff", "--no-textconv", "--no-color", "--binary")


@dataclass(frozen=True, kw_only=True)
class GitState:
    """A checkout. `diff` is the change against HEAD, `status` lists untracked files too.

    `unseen` are changes that git does not show; they are in neither. `behind` counts the commits
    of the branch's `upstream` that HEAD lacks, as of the last fetch; None without an upstream.
    """

    checkout: Path
    branch: str | None
    sha: str | None
    status: str
    diff: str
    upstream: str | None = None
    behind: int | None = None
    unseen: tuple[Unseen, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def dirty(self) -> bool:
        """True if a file differs from the commit, or is not in it, whether git shows it or not."""
        return bool(self.changed)

    @property
    def changed(self) -> list[str]:
        """A line for each of these files: git's own, then what it does not show."""
        return [*self.status.splitlines(), *(f"?  {one}" for one in self.unseen)]

    @property
    def diff_sha256(self) -> str:
        """Digest of the change against HEAD, before anything in it is blanked."""
        text = "".join([self.diff, *(f"{one} {one.sha256}\n" for one in self.unseen)])
        return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def find_checkout() -> Path | None:
    """The checkout that the nsa package is run from, else the current folder's, else None.

    A package in site-packages is not part of a checkout that merely contains the environment.
    """
    if package := _package_folder():
        known = _git(package, "ls-files", "--error-unmatch", "__init__.py")
        if known.ok and (top := _top_level(package)):
            return top
    return _top_level(Path.cwd())


def _package_folder() -> Path | None:
    spec = importlib.util.find_spec("nsa")
    return Path(spec.origin).resolve().parent if spec and spec.origin else None


def why_no_checkout() -> str:
    """Why `find_checkout` found none, and what to do where git refuses one that is there."""
    for folder in filter(None, (_package_folder(), Path.cwd())):
        said = _git(folder, "rev-parse", "--show-toplevel")
        if not said.ok and (refused := _REFUSED.search(said.stderr)):
            path = refused[1]
            return (
                f"git refuses {path}, which another user owns: "
                f"`git config --global --add safe.directory {path}`"
            )
    return "neither the nsa package nor the current folder belongs to a git checkout"


def head_sha(checkout: Path) -> str | None:
    """The full sha of HEAD, or None where there is no commit yet."""
    result = _git(checkout, "rev-parse", "--verify", "HEAD")
    return result.stdout.strip() if result.ok else None


def commit_of(checkout: Path, name: str) -> str | None:
    """The full sha of the commit that a name (sha, tag, HEAD) stands for; None for no commit."""
    result = _git(checkout, "rev-parse", "--verify", "--end-of-options", f"{name}^{{commit}}")
    return result.stdout.strip() if result.ok else None


def clone_at(source: Path, commit: str, target: Path) -> str:
    """Make a clean checkout of a commit at `target`; empty, or why it could not be made.

    A clone that shares the objects: nothing is written into the source, so that nothing has to be
    taken back there, however this ends. No hook of anybody runs.
    """
    clone = ("clone", "--quiet", "--shared", "--no-checkout", "--template=")
    made = _git(source, *clone, "--", str(source), str(target))
    if made.ok:
        made = _git(target, *_NO_HOOKS, "checkout", "--quiet", "--detach", commit)
    return made.problem


def read_git(checkout: Path) -> GitState:
    """Read branch, commit, status and diff of a checkout; what failed is in `problems`."""
    branch = _git(checkout, "symbolic-ref", "--short", "-q", "HEAD")
    sha = _git(checkout, "rev-parse", "--verify", "HEAD")
    status = _git(checkout, "status", "--porcelain=v1", "--untracked-files=normal")
    diff = _git(checkout, *_DIFF) if sha.ok else None
    upstream = _git(checkout, "rev-parse", "--abbrev-ref", "--symbolic-full-name", "@{upstream}")
    behind = _git(checkout, "rev-list", "--count", "HEAD..@{upstream}")
    results = [result for result in (sha, status, diff) if result is not None]
    return GitState(
        checkout=checkout,
        # A detached HEAD has no branch; that is a state, not an error.
        branch=branch.stdout.strip() if branch.ok else None,
        sha=sha.stdout.strip() if sha.ok else None,
        status=status.stdout,
        diff=diff.stdout if diff is not None else "",
        # Most checkouts in CI have no upstream, and nothing is fetched here: only told.
        upstream=upstream.stdout.strip() if upstream.ok else None,
        behind=int(behind.stdout) if behind.ok else None,
        unseen=tuple(find_unseen(checkout, partial(_git, checkout))),
        problems=tuple(result.problem for result in results if not result.ok),
    )


def _top_level(folder: Path) -> Path | None:
    result = _git(folder, "rev-parse", "--show-toplevel")
    return Path(result.stdout.strip()) if result.ok and result.stdout.strip() else None


def _git(folder: Path, *arguments: str) -> ToolResult:
    # surrogateescape: a diff may hold bytes of any encoding, and its digest must not change.
    return run_tool(
        [*_GIT, "-C", str(folder), *arguments],
        timeout_s=_TIMEOUT_S,
        errors="surrogateescape",
        variables={"LC_ALL": "C"},  # what it refuses is known by its words
        without=GIT_PLACES,
    )
