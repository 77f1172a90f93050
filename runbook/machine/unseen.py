"""Changes of a checkout that `git status` does not show, found by reading the files themselves.

An index that was told not to look (`update-index --skip-worktree`, `--assume-unchanged`), a file
with an old time stamp, a filter, an ignored module beside the tracked ones: in each case git calls
the checkout clean, and something else runs.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from runbook.process.start import ToolResult

_LINK, _FILE = "120000", ("100644", "100755")
_LFS = "version https://git-lfs"
# What Python imports: a module of these suffixes stands beside, or before, a tracked one.
_MODULES = (".py", ".pyc", ".so")
_CACHE = "__pycache__"
# In the header of a cached module: found by the source's hash, which is looked at or not.
_BY_HASH, _LOOKS = 0b01, 0b10


@dataclass(frozen=True, kw_only=True)
class Unseen:
    """A file that is not as the commit has it, in words, with the digest of what lies there."""

    path: str
    why: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.path} {self.why}, which git does not show"


def find_unseen(checkout: Path, git: Callable[..., ToolResult]) -> list[Unseen]:
    """What differs from HEAD, or can be imported, and git does not show; sorted by path.

    `git` runs one git command in the checkout. Modules are looked for beside the checkout's
    packages and in its top folder. Empty where there is no commit.
    """
    entries = (line.partition("\t") for line in _items(git("ls-tree", "-rz", "HEAD")))
    tracked = {path: entry.split(" ") for entry, _, path in entries}
    if not tracked:
        return []
    shown = set(_items(git("diff", "HEAD", "--no-ext-diff", "--name-only", "-z")))
    shown |= set(_items(git("ls-files", "--others", "--exclude-standard", "-z")))
    found = [
        *_changed(checkout, tracked, shown, git),
        *_beside(checkout, tracked, shown),
        *_caches(checkout, tracked),
    ]
    return sorted(found, key=lambda one: one.path)


def _items(answer: ToolResult) -> list[str]:
    return [item for item in answer.stdout.split("\0") if item] if answer.ok else []


def _changed(
    checkout: Path,
    tracked: Mapping[str, list[str]],
    shown: set[str],
    git: Callable[..., ToolResult],
) -> Iterator[Unseen]:
    sparse = git("config", "--type=bool", "core.sparseCheckout").stdout.strip() == "true"
    for name, (mode, _, blob) in tracked.items():
        if name in shown or mode not in (_LINK, *_FILE):
            continue
        path = checkout / name
        content = _content(path, mode)
        if content is None:
            # A sparse checkout lacks what nobody asked for.
            if not sparse or os.path.lexists(path):
                yield Unseen(path=name, why="is gone or of another kind", sha256="")
        elif _blob(content, blob) != blob and not _same_text(content, git, blob):
            yield _unseen(name, "differs from the commit", content)


def _content(path: Path, mode: str) -> bytes | None:
    """What git would store of the file; None if it is not there, or is no such file."""
    try:
        if mode == _LINK:
            return os.fsencode(path.readlink())
        return None if path.is_symlink() else path.read_bytes()
    except OSError:
        return None


def _blob(content: bytes, like: str) -> str:
    """The name that git gives to such a content, by the algorithm of the name `like`."""
    new = hashlib.sha256 if len(like) == 64 else hashlib.sha1
    return new(b"blob %d\0" % len(content) + content).hexdigest()


def _same_text(content: bytes, git: Callable[..., ToolResult], blob: str) -> bool:
    """True for a file that git stores otherwise by a common rule: its line ends, or elsewhere."""
    stored = git("cat-file", "blob", blob)
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
    """Compiled modules that Python runs without a look at their source."""
    for package in _packages(tracked):
        for path in (checkout / package).rglob(f"{_CACHE}/*.pyc"):
            content = path.read_bytes()
            flags = int.from_bytes(content[4:8], "little")
            if flags & _BY_HASH and not flags & _LOOKS:
                name = path.relative_to(checkout).as_posix()
                yield _unseen(name, "runs whatever its source says", content)


def _unseen(name: str, why: str, content: bytes) -> Unseen:
    return Unseen(path=name, why=why, sha256=hashlib.sha256(content).hexdigest())
