"""Which kinds of the commands that the program prints are really executed, and by which test.

A test says so with `@pytest.mark.executes("runbook judge", ...)`, and fails where it did not: what
types a line, in a test or in what tests share, notes it here with its exit code.
`tests/reports/test_printed.py` holds the kinds that are printed against the marks.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

MARK = "executes"
_DRY_RUN = "--dry-run"
_MODES = (_DRY_RUN, "--resume", "--phase", "--until")
# Refused by the program, broken inside it, or not found by a shell.
_NOT_EXECUTED = (2, 70, 126, 127)
# By the test that runs, and by what tests share, which outlives the one that asked for it first.
_noted: set[str] = set()
_shared: set[str] = set()


def kind_of(line: str) -> str:
    """What makes two printed commands the same kind: the program and its mode, without values."""
    try:
        words = shlex.split(line)
    except ValueError:  # half a quotation, in a sentence
        words = line.split()
    while words and re.fullmatch(r"[A-Z][A-Z0-9_]*=.*", words[0], re.DOTALL):
        words.pop(0)
    program, *rest = _without_env(words) or [""]
    if program == "runbook":
        if "--help" in rest:
            return "runbook --help"
        of_runs = rest[:1] in (["run"], ["launch"])
        modes = [mode for mode in _MODES if mode in rest and (of_runs or mode == _DRY_RUN)]
        return " ".join([program, *rest[:1], *modes])
    if "-m" in rest[:-1]:
        module = rest[rest.index("-m") + 1]
        own = module.startswith(("nsa.ceilings", "pytest", "runbook"))
        return f"-m {module if own else 'TRAINER'}"
    return program if program == "export" else " ".join([program, *rest[:1]])


def _without_env(words: list[str]) -> list[str]:
    """What `env -u NAME` starts."""
    if words[:2] != ["env", "-u"]:
        return words
    return words[2 * words.count("-u") + 1 :]


def note(line: str | Sequence[str], code: int = 0) -> None:
    """A command line, or its words, was executed and ended with this exit code."""
    text = line if isinstance(line, str) else shlex.join(line)
    if code not in _NOT_EXECUTED:
        _noted.add(kind_of(text.partition("\n")[0]))


def noted() -> frozenset[str]:
    """The kinds executed since the test began, and by what this process shares with others."""
    return frozenset(_noted | _shared)


def forget() -> None:
    """Another test begins."""
    _noted.clear()


def share(kinds: frozenset[str]) -> None:
    """Something that tests share was made by these."""
    _shared.update(kinds)


@contextmanager
def apart() -> Iterator[set[str]]:
    """The kinds that are executed meanwhile."""
    before = set(_noted)
    _noted.clear()
    made: set[str] = set()
    try:
        yield made
    finally:
        made.update(_noted)
        _noted.update(before)


def marked(tests: Path) -> Iterator[tuple[str, str]]:
    """Each kind that a test below this folder is marked with, and which test."""
    for path in sorted(tests.rglob("test_*.py")):
        text = path.read_text("utf-8")
        if f"mark.{MARK}(" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            for call in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
                if isinstance(call, ast.Call) and ast.unparse(call.func) == f"pytest.mark.{MARK}":
                    where = f"{path.relative_to(tests)}::{node.name}"
                    yield from ((ast.literal_eval(kind), where) for kind in call.args)
