"""Mutants of the code that judges, and how many of them the tests kill.

    pip install -e '.[dev,mutants]'
    python -m benchmarks.judging_mutants --seed 1 --sample 150 --results DIR

    --list         the mutants of this sample; runs nothing
    --results DIR  the coverage and what was killed are kept here, and not run again
    --workers N    so many copies of the repository at a time (default 2)

A site is a place in phases, decide, verify, read or stats where cosmic-ray has a change to make.
Sites are drawn at random, then one change of each. What cannot change a verdict is not drawn:
annotations, and the arguments of dataclass decorators. Which tests run a line comes from one
measurement of coverage; a mutant meets all tests that run its statement, the slow
ones and those that start the trainer excepted. A mutant survives if they all pass.
The survivors that no test can kill stand in judging_equivalents.yaml, each with its reason.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import Queue
from xml.etree import ElementTree

import yaml
from cosmic_ray.ast import get_ast
from cosmic_ray.mutating import MutationVisitor
from cosmic_ray.plugins import get_operator, operator_names
from coverage import CoverageData

from benchmarks.program import of_copy, write_anew

ROOT = Path(__file__).resolve().parents[1]
EQUIVALENTS = Path(__file__).with_name("judging_equivalents.yaml")
JUDGES = (
    "phases/**/*.py",
    "runbook/accounts/**/*.py",
    "runbook/folder/**/*.py",
    "runbook/stats/**/*.py",
    "runbook/engine/intact.py",
    "runbook/tools/decide.py",
)
# Tests of other parts do not run a line of these; those of the registry refuse a package of a copy,
# and those of a night ask git, which a copy does not have.
NOT_RUN = ("attention", "train", "data", "nightly", "test_registry.py")
TESTS = ("tests", *(f"--ignore=tests/{name}" for name in NOT_RUN))
QUICK = ("-m", "not slow and not e2e", "-p", "no:cacheprovider", "-q")
# These two need arguments, and put names in the place of other names.
NOT_USED = ("core/VariableReplacer", "core/VariableInserter")
TIME_LIMIT_S = 900.0
# A test failed; collecting was interrupted; a test named on the command line was not found. All of
# them are there in the unchanged copy: `measure` asks.
KILLED = (1, 2, 4)


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One change. before, after: the changed lines, stripped. tests: how many met it."""

    path: str
    line: int
    before: str
    after: str
    outcome: str = ""
    tests: int = 0

    @property
    def key(self) -> tuple[str, str, str]:
        return self.path, self.before, self.after


@dataclass(frozen=True, kw_only=True)
class Change:
    """What cosmic-ray can do at a site: an operator, and which of its occurrences in the file."""

    path: str
    at: tuple[int, int]
    operator: str
    occurrence: int


def changes(path: str) -> Iterator[Change]:
    """Every change in a file, except where it cannot matter."""
    source = (ROOT / path).read_text(encoding="utf-8")
    tree = get_ast(source)
    allowed = _Allowed(source)
    for name in operator_names():
        if name in NOT_USED:
            continue
        operator = get_operator(name)()
        occurrence = 0
        for node in _walk(tree):
            for start, _ in operator.mutation_positions(node):
                if allowed(name, start):
                    yield Change(path=path, at=start, operator=name, occurrence=occurrence)
                occurrence += 1


def _walk(node: object) -> Iterator[object]:
    """The nodes in the order in which cosmic-ray's visitor counts them."""
    yield node
    for child in getattr(node, "children", ()):
        yield from _walk(child)


class _Allowed:
    """Whether a site is neither in an annotation, nor in a dataclass decorator, nor a bare `*`."""

    def __init__(self, source: str) -> None:
        self._out: list[tuple[tuple[int, int], tuple[int, int]]] = []
        self._binary: list[tuple[tuple[int, int], tuple[int, int]]] = []
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.BinOp):
                self._binary.append((_end(node.left), _start(node.right)))
            for part in _without_effect(node):
                self._out.append((_start(part), _end(part)))

    def __call__(self, operator: str, at: tuple[int, int]) -> bool:
        if "ReplaceBinaryOperator" in operator and not _within(at, self._binary):
            return False
        return not _within(at, self._out)


def _without_effect(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, ast.AnnAssign | ast.arg):
        yield from (one for one in (node.annotation,) if one is not None)
    elif isinstance(node, ast.FunctionDef) and node.returns is not None:
        yield node.returns
    elif isinstance(node, ast.ClassDef):
        calls = [one for one in node.decorator_list if isinstance(one, ast.Call)]
        yield from (one for one in calls if ast.unparse(one.func) == "dataclass")


def _start(node: ast.expr) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _end(node: ast.expr) -> tuple[int, int]:
    return node.end_lineno or node.lineno, node.end_col_offset or node.col_offset


def _within(at: tuple[int, int], ranges: Sequence[tuple[tuple[int, int], tuple[int, int]]]) -> bool:
    return any(start <= at < end for start, end in ranges)


def sample(size: int, seed: int) -> list[Change]:
    """So many sites of the judges, drawn at random, and one change of each."""
    sites: dict[tuple[str, tuple[int, int]], list[Change]] = defaultdict(list)
    for pattern in JUDGES:
        for path in sorted(ROOT.glob(pattern)):
            for change in changes(path.relative_to(ROOT).as_posix()):
                sites[change.path, change.at].append(change)
    draw = random.Random(seed)
    chosen: list[Change] = []
    for site in draw.sample(sorted(sites), len(sites)):
        change = draw.choice(sites[site])
        if len(chosen) < size and _is_python(change):
            chosen.append(change)
    return chosen


def _is_python(change: Change) -> bool:
    try:
        ast.parse(mutated(change)[1])
    except SyntaxError:
        return False
    return True


def mutated(change: Change) -> tuple[str, str]:
    """The file before and after. Raises ValueError where the change is none."""
    source = (ROOT / change.path).read_text(encoding="utf-8")
    operator = get_operator(change.operator)()
    text = MutationVisitor.mutate_code(source, operator, change.occurrence)
    if text is None or text == source:
        raise ValueError(f"{change} changes nothing")
    return source, text


def describe(change: Change) -> Mutant:
    source, text = mutated(change)
    lines = list(difflib.ndiff(source.splitlines(), text.splitlines()))
    before = " ".join(line[2:].strip() for line in lines if line.startswith("- "))
    after = " ".join(line[2:].strip() for line in lines if line.startswith("+ "))
    return Mutant(path=change.path, line=_line(change), before=before, after=after)


def _line(change: Change) -> int:
    """The number of the first line that the change touches."""
    pairs = zip(*(text.splitlines() for text in mutated(change)), strict=False)
    return next(number for number, (old, new) in enumerate(pairs, 1) if old != new)


class Copies:
    """Copies of the repository, each for one mutant at a time, and the tests that run a line."""

    def __init__(self, results: Path, scratch: Path, workers: int) -> None:
        self._free: Queue[Path] = Queue()
        for number in range(workers):
            copy = scratch / str(number)
            shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "artifacts"))
            self._free.put(copy)
        self._coverage = results.resolve() / "coverage"
        self._durations = results.resolve() / "durations.xml"
        self._took: dict[str, float] = {}

    def measure(self) -> None:
        """Which test runs which line. Raises CalledProcessError where a test fails or is gone."""
        if not self._coverage.exists():
            self._cover()
        data = CoverageData(str(self._coverage))
        data.read()
        names = {name.rsplit("|", 1)[0] for name in data.measured_contexts()} - {""}
        names = {name for name in names if "test_registry" not in name}
        for case in ElementTree.parse(self._durations).iter("testcase"):
            path = case.attrib["classname"].replace(".", "/")
            self._took[f"{path}.py::{case.attrib['name']}"] = float(case.attrib["time"])
        copy = self._free.get()
        listed = _listed(copy, sorted(names))
        words = _pytest("--collect-only", "-qq", "-n0", listed)
        subprocess.run(words, cwd=copy, env=of_copy(copy), check=True, capture_output=True)
        self._free.put(copy)

    def _cover(self) -> None:
        # Not coverage.ini: files of that prefix are removed before the measurement.
        settings = self._coverage.with_name("measure.ini")
        settings.write_text(
            f"[run]\nsource = phases,runbook\nrelative_files = true\ndata_file = {self._coverage}\n"
        )
        words = (*TESTS, *QUICK, "-n", str(self._free.qsize()), "--dist", "worksteal")
        words += (f"--junitxml={self._durations}",)
        cover = ("--cov", f"--cov-config={settings}", "--cov-context=test", "--cov-report=", "-x")
        copy = self._free.get()
        subprocess.run(_pytest(*words, *cover), cwd=copy, env=of_copy(copy), check=True)
        self._free.put(copy)

    def tests(self, change: Change) -> list[str]:
        """The tests that run the statement of this change, the quickest first.

        All that run something of its file, if none runs the statement.
        """
        data = CoverageData(str(self._coverage))
        data.read()
        contexts = data.contexts_by_lineno(change.path)
        first, last = _statement(change)
        names = {name for line in range(first, last + 1) for name in contexts.get(line, ())}
        names = names - {""} or {name for found in contexts.values() for name in found} - {""}
        return sorted({name.rsplit("|", 1)[0] for name in names}, key=self._seconds)

    def _seconds(self, test: str) -> tuple[float, str]:
        """How long a test took in the unchanged copy, and its name."""
        return self._took.get(test, 0.0), test

    def judge(self, change: Change) -> Mutant:
        """Run its tests with this change in force."""
        tests = self.tests(change)
        copy = self._free.get()
        source, text = mutated(change)
        try:
            write_anew(copy / change.path, text)
            outcome = _run(copy, tests)
        finally:
            write_anew(copy / change.path, source)
            self._free.put(copy)
        return replace(describe(change), outcome=outcome, tests=len(tests))


def _statement(change: Change) -> tuple[int, int]:
    """First and last line of the innermost statement around a site; of a block its head only."""
    source, line = mutated(change)[0], _line(change)
    found = (line, line)
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.stmt):
            continue
        body = getattr(node, "body", None)
        last = body[0].lineno - 1 if body else node.end_lineno or node.lineno
        if node.lineno <= line <= last:
            found = (node.lineno, last)
    return found


def _run(copy: Path, tests: Sequence[str]) -> str:
    words = _pytest("-x", *QUICK, "-n0", _listed(copy, tests))
    try:
        done = subprocess.run(
            words,
            cwd=copy,
            env=of_copy(copy),
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "killed: out of time"
    if done.returncode in KILLED:
        return "killed"
    if done.returncode == 0:
        return "survived"
    raise RuntimeError(f"pytest ended with {done.returncode}: {done.stdout[-800:]}{done.stderr}")


def _listed(copy: Path, tests: Sequence[str]) -> str:
    """A word that names all these tests."""
    path = copy / "these-tests.txt"
    path.write_text("\n".join(tests), encoding="utf-8")
    return f"@{path}"


def _pytest(*words: str) -> list[str]:
    return [sys.executable, "-m", "pytest", *words]


def equivalents() -> dict[tuple[str, str, str], str]:
    """Why a mutant is no other program, by its file and its lines before and after."""
    listed = yaml.safe_load(EQUIVALENTS.read_text(encoding="utf-8")) or []
    return {(item["path"], item["before"], item["after"]): item["why"] for item in listed}


def _killed_before(kept: Path, wanted: set[tuple[str, str, str]]) -> list[Mutant]:
    if not kept.exists():
        return []
    lines = kept.read_text(encoding="utf-8").splitlines()
    all_of_them = {mutant.key: mutant for mutant in (Mutant(**json.loads(line)) for line in lines)}
    return [
        mutant
        for key, mutant in all_of_them.items()
        if key in wanted and mutant.outcome.startswith("killed")
    ]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.judging_mutants")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sample", type=int, default=150)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--results", type=Path, default=ROOT / "artifacts" / "judging_mutants")
    parser.add_argument("--list", action="store_true")
    asked = parser.parse_args(words)
    chosen = sample(asked.sample, asked.seed)
    if asked.list:
        for change in chosen:
            print(json.dumps(asdict(describe(change))))
        return 0
    asked.results.mkdir(parents=True, exist_ok=True)
    named = equivalents()
    kept = asked.results / f"seed-{asked.seed}.jsonl"
    found = _killed_before(kept, {describe(change).key for change in chosen})
    known = {mutant.key for mutant in found}
    chosen = [change for change in chosen if describe(change).key not in known]
    with (
        tempfile.TemporaryDirectory(prefix="mutants-") as scratch,
        ThreadPoolExecutor(asked.workers) as pool,
    ):
        copies = Copies(asked.results, Path(scratch), asked.workers)
        copies.measure()
        for done in as_completed([pool.submit(copies.judge, change) for change in chosen]):
            found.append(done.result())
            line = json.dumps(asdict(found[-1]))
            print(line, flush=True)
            with kept.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
    alive = [one for one in found if one.outcome == "survived"]
    unnamed = [one for one in alive if one.key not in named]
    killed = len(found) - len(alive)
    print(
        f"{killed} of {len(found)} killed, {len(alive) - len(unnamed)} named as equivalent, "
        f"{len(unnamed)} neither (seed {asked.seed})",
        file=sys.stderr,
    )
    return 1 if unnamed else 0


if __name__ == "__main__":
    sys.exit(main())
