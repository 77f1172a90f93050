"""Where the code that judges can be changed, and the change of each place."""

from __future__ import annotations

import ast
import difflib
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cosmic_ray.ast import get_ast
from cosmic_ray.mutating import MutationVisitor
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).resolve().parents[2]
JUDGES = (
    "phases/**/*.py",
    "runbook/accounts/**/*.py",
    "runbook/folder/**/*.py",
    "runbook/stats/**/*.py",
    "runbook/engine/intact.py",
    "runbook/tools/decide.py",
)
# These two need arguments, and put names in the place of other names.
NOT_USED = ("core/VariableReplacer", "core/VariableInserter")


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
    return Mutant(path=change.path, line=line_of(change), before=before, after=after)


def line_of(change: Change) -> int:
    """The number of the first line that the change touches."""
    pairs = zip(*(text.splitlines() for text in mutated(change)), strict=False)
    return next(number for number, (old, new) in enumerate(pairs, 1) if old != new)
