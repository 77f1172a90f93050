"""What is injected, and the copy of the repository that it is injected into.

A defect is text that occurs exactly once in a file, and what replaces it. They are kept as data in
`defects/`; a text that has moved is an error, never a defect that is silently not there.
"""

from __future__ import annotations

import ast
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
DEFECTS_FOLDER = Path(__file__).parent / "defects"
# What a run needs. Data first, then the packages.
COPIED = ("templates", "configs", "nsa", "runbook", "phases", "reports")
ALL_AT_ONCE = "eight"
_moments = itertools.count(1_000_000_000)


class AnchorError(ValueError):
    """A defect no longer fits the source: its text does not occur exactly once."""


@dataclass(frozen=True, kw_only=True)
class Edit:
    """One replacement. path: below the repository; old: occurs there exactly once."""

    path: str
    old: str
    new: str


@dataclass(frozen=True, kw_only=True)
class Defect:
    """What is injected, the phases to run, the rows that must not pass, patterns of their reasons.

    remedy: pattern of the remedy that one of these rows has to give; none where it is empty. A
    defect of several edits in one file has them applied in order.
    """

    name: str
    area: str
    what: str
    edits: tuple[Edit, ...]
    phases: tuple[str, ...]
    rows: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    remedy: str = ""


def load(name: str) -> tuple[Defect, ...]:
    """The defects of one file. Raises TypeError or KeyError where it has other keys."""
    text = (DEFECTS_FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    return tuple(_defect(item) for item in yaml.safe_load(text))


def load_all() -> tuple[Defect, ...]:
    """All defects that are injected one at a time, those that once gave GO first.

    Raises ValueError where two have one name.
    """
    names = sorted(path.stem for path in DEFECTS_FOLDER.glob("*.yaml"))
    names.sort(key=lambda name: name != "known")
    found = [defect for name in names if name != ALL_AT_ONCE for defect in load(name)]
    if len({defect.name for defect in found}) < len(found):
        raise ValueError(f"two defects have one name in {DEFECTS_FOLDER}")
    return tuple(found)


def _defect(item: dict[str, Any]) -> Defect:
    item["edits"] = tuple(Edit(**one) for one in item["edits"])
    item["says"] = tuple(item["says"])
    for name in ("phases", "rows"):
        item[name] = tuple(item[name].split())
    return Defect(**item)


def edited(root: Path, edits: Sequence[Edit]) -> dict[str, str]:
    """The files below `root` as the edits make them, by path.

    Raises AnchorError where an edit does not fit, changes nothing, or leaves no valid Python.
    """
    texts: dict[str, str] = {}
    for edit in edits:
        text = texts.get(edit.path) or (root / edit.path).read_text(encoding="utf-8")
        if (count := text.count(edit.old)) != 1 or edit.old == edit.new:
            raise AnchorError(f"{edit.path} holds its text {count} times")
        texts[edit.path] = text.replace(edit.old, edit.new)
    for path, text in texts.items():
        try:
            ast.parse(text)
        except SyntaxError as error:
            raise AnchorError(f"{path} would not be Python: {error}") from error
    return texts


def broken_anchors(root: Path, defects: Sequence[Defect]) -> list[str]:
    """Why each defect that does not fit the source in `root` does not."""
    problems = []
    for defect in defects:
        try:
            edited(root, defect.edits)
        except AnchorError as error:
            problems.append(f"{defect.name}: {error}")
    return problems


def write_anew(path: Path, text: str) -> None:
    """Write a module of a copy. Python compiles it anew: each writing has a second of its own."""
    path.write_text(text, encoding="utf-8")
    moment = next(_moments)
    os.utime(path, (moment, moment))


def of_copy(root: Path) -> dict[str, str]:
    """The environment of a program in a copy: its packages first, none of the caller's toggles.

    One thread for each process, as under torchrun.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NSA_")}
    return {**kept, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}


def run_in(root: Path, *words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run Python in a copy, and keep what it says."""
    given: dict[str, Any] = {"cwd": root, "env": of_copy(root), "capture_output": True} | more
    return subprocess.run([sys.executable, *words], text=True, **given)


class Copy:
    """A copy of the packages, in which one defect at a time is in force."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in COPIED:
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        # The mark of a checkout.
        shutil.copy2(ROOT / "pyproject.toml", root)

    def check(self, defects: Sequence[Defect]) -> None:
        """Raise AnchorError that lists all defects that do not fit; and that the copy does not run.

        What runs is the copy only if Python imports the packages from it.
        """
        problems = broken_anchors(self.root, defects)
        packages = [name for name in COPIED if (self.root / name / "__init__.py").exists()]
        code = "".join(f"import {name}; print({name}.__file__); " for name in packages)
        found = run_in(self.root, "-P", "-c", code, check=True).stdout.splitlines()
        problems += [f"{path} is not of the copy" for path in found if str(self.root) not in path]
        if problems:
            raise AnchorError("\n".join(problems))

    @contextmanager
    def injected(self, edits: Sequence[Edit]) -> Iterator[None]:
        """The edits are in the copy within. Raises AnchorError where one does not fit."""
        texts = edited(self.root, edits)
        kept = {path: (self.root / path).read_text("utf-8") for path in texts}
        try:
            for path, text in texts.items():
                write_anew(self.root / path, text)
            yield
        finally:
            for name, text in kept.items():
                write_anew(self.root / name, text)
