"""What the project may hold: code lines, files, words and commands, against `[tool.budget]`.

    python scripts/budget.py [--pyproject FILE]

Prints now and at most for each number; exits with 1 where one is over. Code lines are those that
are neither blank nor comment nor docstring. `modules` is the most modules in one folder, `thin`
the number of modules under 40 code lines that one other imports alone, `judging` the files
of the packages that one has to walk through from a phase's evidence to its rows and the verdict.
"""

from __future__ import annotations

import argparse
import ast
import io
import sys
import tarfile
import tempfile
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import FrameType

import grimp

from runbook.cli import COMMANDS
from runbook.config.load import load_profile_document
from runbook.config.setup import setup_of_record
from runbook.engine.verify import judged
from runbook.folder import RECORD_FILE
from runbook.folder.manifest import load_record

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("nsa", "runbook", "phases", "reports")
FOLDERS = (*PACKAGES, "benchmarks", "tests")
_THIN_LINES = 40
_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip
_MAY_HAVE_DOCSTRING = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def code_lines(source: str) -> int:
    """Lines of a Python file that are neither blank nor comment nor docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _MAY_HAVE_DOCSTRING) and ast.get_docstring(node, clean=False):
            text = node.body[0]
            lines.difference_update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return len(lines)


def measured(root: Path = ROOT) -> dict[str, int]:
    """Every number by its name, such as `nsa.code`."""
    found: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for folder in FOLDERS:
        files = sorted((root / folder).rglob("*.py"))
        # The tests that are shipped with nsa count as tests.
        shipped = set((root / "nsa" / "tests").rglob("*.py"))
        files = [*files, *shipped] if folder == "tests" else [f for f in files if f not in shipped]
        own = {file: code_lines(file.read_text("utf-8")) for file in files}
        modules = Counter(file.parent for file in files if file.name != "__init__.py")
        found[f"{folder}.code"] = sum(own.values())
        found[f"{folder}.files"] = len(files)
        found[f"{folder}.modules"] = max(modules.values())
        sizes |= {".".join(f.relative_to(root).with_suffix("").parts): n for f, n in own.items()}
    found["packages.code"] = sum(found[f"{folder}.code"] for folder in PACKAGES)
    found["packages.files"] = sum(found[f"{folder}.files"] for folder in PACKAGES)
    docs = [file for file in (root / "docs").rglob("*.md") if "examples" not in file.parts]
    found["docs.words"] = words((*docs, root / "README.md", root / "CONTRIBUTING.md"))
    found["glossary.words"] = words([root / "docs" / "glossary.md"])
    found["thin"] = len(thin_modules(sizes))
    found["commands"] = len(COMMANDS)
    return found | {"judging": len(judging(root))}


def judging(root: Path, phase: str = "baseline") -> set[str]:
    """The files of which something runs while this phase of the kept GO is judged.

    It is judged twice in this process: the first time loads modules and fills what is kept.
    """
    called: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            called.add(frame.f_code.co_filename)

    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(root / "tests" / "frozen" / "runs" / "go.tar.xz") as archive:
            archive.extractall(folder, filter="data")
        (run,) = Path(folder).iterdir()
        record = load_record(run)
        profile = load_profile_document(record.profile_document, where=RECORD_FILE)
        setup = setup_of_record(record, profile=profile)
        only = tuple(one for one in record.phases if one.name == phase)
        record = record.model_copy(update={"phases": only})
        judged(record, run, setup)
        sys.setprofile(note)
        try:
            judged(record, run, setup)
        finally:
            sys.setprofile(None)
    own = tuple(f"{root / package}/" for package in PACKAGES)
    return {file for file in called if file.startswith(own)}


def words(files: Iterable[Path]) -> int:
    """Words of these pages together."""
    return sum(len(file.read_text("utf-8").split()) for file in files)


def thin_modules(sizes: Mapping[str, int]) -> list[str]:
    """Modules of the packages with little code, each imported by one other alone."""
    graph = grimp.build_graph(*PACKAGES)
    return [
        name
        for name in sorted(graph.modules & sizes.keys())
        if sizes[name] < _THIN_LINES and len(graph.find_modules_that_directly_import(name)) == 1
    ]


def ceilings(pyproject: Path) -> dict[str, int]:
    """The table `[tool.budget]`, by the names of `measured`."""
    table = tomllib.loads(pyproject.read_text("utf-8"))["tool"]["budget"]
    found: dict[str, int] = {}
    for name, value in table.items():
        inner = value.items() if isinstance(value, dict) else [("", value)]
        found |= {f"{name}.{key}".rstrip("."): most for key, most in inner}
    return found


def main(argv: list[str] | None = None) -> int:
    """Print the table; 1 where a number is over, or has no ceiling, or a ceiling no number."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pyproject", type=Path, default=ROOT / "pyproject.toml")
    now, most = measured(), ceilings(parser.parse_args(argv).pyproject)
    problems = [f"{name}: in one of both only" for name in sorted(now.keys() ^ most.keys())]
    print(f"{'':20}{'now':>8}{'at most':>9}")
    for name in (name for name in now if name in most):
        print(f"{name:20}{now[name]:>8}{most[name]:>9}")
        if now[name] > most[name]:
            problems.append(f"{name}: {now[name]} is {now[name] - most[name]} over {most[name]}")
    for problem in problems:
        print(f"over budget: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
