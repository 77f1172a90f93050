"""Which commit is being tested, on which branch, and what was changed since."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from nsa.contract import GIT_PLACES
from nsa.contract.digests import other_code
from runbook.process import ToolResult, run_tool

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


def commit_of(checkout: Path, name: str = "HEAD") -> str | None:
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
        # A detached HEAD has no branch; that is a state, not an error.
        branch=branch.stdout.strip() if branch.ok else None,
        sha=sha.stdout.strip() if sha.ok else None,
        status=status.stdout,
        diff=diff.stdout if diff is not None else "",
        # Most checkouts in CI have no upstream, and nothing is fetched here: only told.
        upstream=upstream.stdout.strip() if upstream.ok else None,
        behind=int(behind.stdout) if behind.ok else None,
        unseen=tuple(_find_unseen(checkout)),
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


_LINK, _FILE = "120000", ("100644", "100755")
_LFS = "version https://git-lfs"
# What Python imports: a module of these suffixes stands beside, or before, a tracked one.
_MODULES = (".py", ".pyc", ".so")
_CACHE = "__pycache__"


@dataclass(frozen=True, kw_only=True)
class Unseen:
    """A file that is not as the commit has it, in words, with the digest of what lies there."""

    path: str
    why: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.path} {self.why}, which git does not show"


def _find_unseen(checkout: Path) -> list[Unseen]:
    """What differs from HEAD, or can be imported, and git does not show; sorted by path.

    Modules are looked for beside the checkout's packages and in its top folder. Empty where there
    is no commit.
    """
    entries = (line.partition("\t") for line in _items(checkout, "ls-tree", "-rz", "HEAD"))
    tracked = {path: entry.split(" ") for entry, _, path in entries}
    if not tracked:
        return []
    shown = set(_items(checkout, "diff", "HEAD", "--no-ext-diff", "--name-only", "-z"))
    shown |= set(_items(checkout, "ls-files", "--others", "--exclude-standard", "-z"))
    found = [
        *_changed(checkout, tracked, shown),
        *_beside(checkout, tracked, shown),
        *_caches(checkout, tracked),
    ]
    return sorted(found, key=lambda one: one.path)


def _items(checkout: Path, *arguments: str) -> list[str]:
    answer = _git(checkout, *arguments)
    return [item for item in answer.stdout.split("\0") if item] if answer.ok else []


def _changed(checkout: Path, tracked: Mapping[str, list[str]], shown: set[str]) -> Iterator[Unseen]:
    sparse = _git(checkout, "config", "--type=bool", "core.sparseCheckout").stdout.strip() == "true"
    for name, (mode, _, blob) in tracked.items():
        if name in shown or mode not in (_LINK, *_FILE):
            continue
        path = checkout / name
        content = _content(path, mode)
        if content is None:
            # A sparse checkout lacks what nobody asked for.
            if not sparse or os.path.lexists(path):
                yield Unseen(path=name, why="is gone or of another kind", sha256="")
        elif not _is_stored(content, checkout, blob):
            yield _unseen(name, "differs from the commit", content)


def _content(path: Path, mode: str) -> bytes | None:
    """What git would store of the file; None if it is not there, or is no such file."""
    try:
        if mode == _LINK:
            return os.fsencode(path.readlink())
        return None if path.is_symlink() else path.read_bytes()
    except OSError:
        return None


def _is_stored(content: bytes, checkout: Path, blob: str) -> bool:
    """Is this the content of that name in git, or stored otherwise by a common rule?

    Such as its line ends, or in another place.
    """
    new = hashlib.sha256 if len(blob) == 64 else hashlib.sha1
    if new(b"blob %d\0" % len(content) + content).hexdigest() == blob:
        return True
    stored = _git(checkout, "cat-file", "blob", blob)
    text = content.decode("utf-8", "surrogateescape").replace("\r\n", "\n").replace("\r", "\n")
    return stored.ok and (stored.stdout.startswith(_LFS) or stored.stdout == text)


def _packages(tracked: Iterable[str]) -> list[str]:
    """Folders of the checkout's top that are packages."""
    parts = (name.split("/") for name in tracked)
    return sorted({part[0] for part in parts if part[1:] == ["__init__.py"]})


def _beside(checkout: Path, tracked: Mapping[str, object], shown: set[str]) -> Iterator[Unseen]:
    """Ignored modules in the packages, and in the top folder."""
    there = [path for path in checkout.iterdir() if path.is_file()]
    for package in _packages(tracked):
        there += [path for path in (checkout / package).rglob("*") if path.is_file()]
    for path in there:
        name = path.relative_to(checkout).as_posix()
        if path.suffix not in _MODULES or _CACHE in path.parts:
            continue
        if name not in tracked and name not in shown:
            yield _unseen(name, "is ignored and can be imported", path.read_bytes())


def _caches(checkout: Path, tracked: Mapping[str, object]) -> Iterator[Unseen]:
    """Modules that run as something else than their source says: their caches are of another."""
    for package in _packages(tracked):
        for path in (checkout / package).rglob("*.py"):
            if runs := other_code(path):
                name = path.relative_to(checkout).as_posix()
                yield _unseen(name, f"is run from a cache of another source in {_CACHE}", runs)


def _unseen(name: str, why: str, content: bytes) -> Unseen:
    return Unseen(path=name, why=why, sha256=hashlib.sha256(content).hexdigest())
