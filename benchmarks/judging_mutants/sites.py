"""Where the code that judges can be changed, and the change of each place."""

from __future__ import annotations

import ast
import difflib
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cosmic_ray.ast import get_ast
from cosmic_ray.mutating import MutationVisitor
from cosmic_ray.plugins import get_operator, operator_names

from benchmarks.planted.copy import ROOT

JUDGES = (
    "phases/**/*.py",
    "runbook/accounts/**/*.py",
    "runbook/engine/verify.py",
    "runbook/folder/**/*.py",
    "runbook/stats/**/*.py",
)
# These two need arguments, and put names in the place of other names.
NOT_USED = ("core/VariableReplacer", "core/VariableInserter")
# Line and column where it begins, and where it ends.
Span = tuple[tuple[int, int], tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One change. before, after: the changed lines, stripped. tests: how many met it.

    line: the first that differs.
    """

    path: str
    line: int
    before: str
    after: str
    outcome: str = ""
    tests: int = 0

    @property
    def key(self) -> tuple[str, str, str]:
        return self.path, self.before, self.after


def changes(path: str) -> Iterator[tuple[tuple[int, int], str, int]]:
    """Of every change in a file, except where it cannot matter: place, operator, occurrence."""
    source = (ROOT / path).read_text(encoding="utf-8")
    tree, (idle, binary) = get_ast(source), _spans(source)
    for name in operator_names():
        if name in NOT_USED:
            continue
        operator = get_operator(name)()
        occurrence = 0
        for node in _walk(tree):
            for start, _ in operator.mutation_positions(node):
                bare = "ReplaceBinaryOperator" in name and not _within(start, binary)
                if not bare and not _within(start, idle):
                    yield start, name, occurrence
                occurrence += 1


def _walk(node: object) -> Iterator[object]:
    """The nodes in the order in which cosmic-ray's visitor counts them."""
    yield node
    for child in getattr(node, "children", ()):
        yield from _walk(child)


def _spans(source: str) -> tuple[list[Span], list[Span]]:
    """Where a change cannot matter, and where an operator stands between two operands."""
    idle, binary = list[Span](), list[Span]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.BinOp):
            binary.append((_end(node.left), _start(node.right)))
        idle += [(_start(part), _end(part)) for part in _without_effect(node)]
    return idle, binary


def _without_effect(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, ast.AnnAssign | ast.arg):
        yield from filter(None, (node.annotation,))
    elif isinstance(node, ast.FunctionDef) and node.returns is not None:
        yield node.returns
    elif isinstance(node, ast.ClassDef):
        calls = [one for one in node.decorator_list if isinstance(one, ast.Call)]
        yield from (one for one in calls if ast.unparse(one.func) == "dataclass")


def _start(node: ast.expr) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _end(node: ast.expr) -> tuple[int, int]:
    return node.end_lineno or node.lineno, node.end_col_offset or node.col_offset


def _within(at: tuple[int, int], ranges: Sequence[Span]) -> bool:
    return any(start <= at < end for start, end in ranges)


def sample(size: int, seed: int) -> list[tuple[Mutant, str]]:
    """So many sites of the judges, drawn at random: one change of each, and its whole file then."""
    sites: dict[tuple[str, tuple[int, int]], list[tuple[str, int]]] = defaultdict(list)
    for pattern in JUDGES:
        for file in sorted(ROOT.glob(pattern)):
            path = file.relative_to(ROOT).as_posix()
            for at, operator, occurrence in changes(path):
                sites[path, at].append((operator, occurrence))
    draw = random.Random(seed)
    chosen: list[tuple[Mutant, str]] = []
    for site in draw.sample(sorted(sites), len(sites)):
        made = mutated(site[0], *draw.choice(sites[site]))
        if made is not None:
            chosen.append(made)
        if len(chosen) == size:
            break
    return chosen


def mutated(path: str, operator: str, occurrence: int) -> tuple[Mutant, str] | None:
    """A change and the file with it, None where that is no Python. Raises ValueError for none."""
    source = (ROOT / path).read_text(encoding="utf-8")
    text = MutationVisitor.mutate_code(source, get_operator(operator)(), occurrence)
    if text is None or text == source:
        raise ValueError(f"{path}: {operator} {occurrence} changes nothing")
    try:
        ast.parse(text)
    except SyntaxError:
        return None
    old, new = source.splitlines(), text.splitlines()
    lines = [line for line in difflib.ndiff(old, new) if line.startswith(("- ", "+ "))]
    pairs = enumerate(zip(old, new, strict=False), 1)
    return Mutant(
        path=path,
        line=next(number for number, (before, after) in pairs if before != after),
        before=" ".join(line[2:].strip() for line in lines if line.startswith("- ")),
        after=" ".join(line[2:].strip() for line in lines if line.startswith("+ ")),
    ), text
