"""Copies of the repository in which the tests meet one change at a time."""

from __future__ import annotations

import ast
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from queue import Queue

from coverage import CoverageData

from benchmarks.judging_mutants.sites import Mutant
from benchmarks.planted.copy import ROOT, run_in, write_anew

# Tests of other parts do not run a line of these; those of the registry refuse a package of a copy,
# and those of a night and of a session on a GPU ask git, which a copy does not have.
NOT_RUN = ("attention", "train", "data", "nightly", "test_registry.py", "test_gpu_session.py")
TESTS = ("tests", *(f"--ignore=tests/{name}" for name in NOT_RUN))
PYTEST = ("-m", "pytest")
QUICK = ("-m", "not slow and not e2e", "-p", "no:cacheprovider", "-q")
# What survives these meets all runs that were kept.
KEPT = ("--long", "-m", "", "tests/frozen")
TIME_LIMIT_S = 900.0
# A test failed; collecting was interrupted; a test named on the command line was not found. All of
# them are there in the unchanged copy: `measure` asks.
KILLED = (1, 2, 4)
SURVIVED = "survived"


class Copies:
    """Copies of the repository, each for one mutant at a time, and the tests that run a line."""

    def __init__(self, results: Path, scratch: Path, workers: int) -> None:
        self._free: Queue[Path] = Queue()
        for number in range(workers):
            copy = scratch / str(number)
            shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "artifacts"))
            self._free.put(copy)
        self._coverage = results.resolve() / "coverage"

    def measure(self) -> None:
        """Which test runs which line. Raises CalledProcessError where a test fails or is gone."""
        if not self._coverage.exists():
            self._cover()
        data = CoverageData(str(self._coverage))
        data.read()
        names = sorted({name.rsplit("|", 1)[0] for name in data.measured_contexts()} - {""})
        copy = self._free.get()
        run_in(copy, *PYTEST, "--collect-only", "-qq", "-n0", _listed(copy, names), check=True)
        self._free.put(copy)

    def _cover(self) -> None:
        # Not coverage.ini: files of that prefix are removed before the measurement.
        settings = self._coverage.with_name("measure.ini")
        settings.write_text(
            f"[run]\nsource = phases,runbook\nrelative_files = true\ndata_file = {self._coverage}\n"
        )
        words = (*TESTS, *QUICK, "-n", str(self._free.qsize()), "--dist", "worksteal")
        cover = ("--cov", f"--cov-config={settings}", "--cov-context=test", "--cov-report=", "-x")
        copy = self._free.get()
        run_in(copy, *PYTEST, *words, *cover, check=True, capture_output=False)
        run_in(copy, *PYTEST, *QUICK, "-n0", *KEPT, check=True, capture_output=False)
        self._free.put(copy)

    def tests(self, change: Mutant) -> list[str]:
        """The tests that run the statement of this change.

        All that run something of its file, if none runs the statement.
        """
        data = CoverageData(str(self._coverage))
        data.read()
        contexts = data.contexts_by_lineno(change.path)
        first, last = _statement(change)
        names = {name for line in range(first, last + 1) for name in contexts.get(line, ())}
        names = names - {""} or {name for found in contexts.values() for name in found} - {""}
        return sorted({name.rsplit("|", 1)[0] for name in names})

    def judge(self, change: Mutant, text: str) -> Mutant:
        """Run its tests with this change in force: `text` is its file then."""
        tests = self.tests(change)
        copy = self._free.get()
        try:
            write_anew(copy / change.path, text)
            outcome = _run(copy, _listed(copy, tests)) or _run(copy, *KEPT) or SURVIVED
        finally:
            write_anew(copy / change.path, (ROOT / change.path).read_text(encoding="utf-8"))
            self._free.put(copy)
        return replace(change, outcome=outcome, tests=len(tests))


def _statement(change: Mutant) -> tuple[int, int]:
    """First and last line of the innermost statement around a site; of a block its head only."""
    source, line = (ROOT / change.path).read_text(encoding="utf-8"), change.line
    found = (line, line)
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.stmt):
            continue
        body = getattr(node, "body", None)
        last = body[0].lineno - 1 if body else node.end_lineno or node.lineno
        if node.lineno <= line <= last:
            found = (node.lineno, last)
    return found


def _run(copy: Path, *tests: str) -> str:
    """How these tests killed it; empty if they all passed."""
    words = ("-x", *QUICK, "-n0", *tests)
    try:
        done = run_in(copy, *PYTEST, *words, timeout=TIME_LIMIT_S)
    except subprocess.TimeoutExpired:
        return "killed: out of time"
    if done.returncode in KILLED:
        return "killed"
    if done.returncode == 0:
        return ""
    raise RuntimeError(f"pytest ended with {done.returncode}: {done.stdout[-800:]}{done.stderr}")


def _listed(copy: Path, tests: Sequence[str]) -> str:
    """A word that names all these tests."""
    path = copy / "these-tests.txt"
    path.write_text("\n".join(tests), encoding="utf-8")
    return f"@{path}"
