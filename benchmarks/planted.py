"""Defects injected one at a time into a copy, each run for real: python benchmarks/planted.py

    --list             names, phases and what must notice; runs nothing
    --only NAME        this defect (repeatable)
    --all-at-once      the eight that once gave GO together
    --json             results as JSON instead of the table
    --results DIR      finished results are kept here and not run again (default artifacts/planted)

A defect is text that occurs exactly once in a file, and what replaces it. It is noticed if each of
its rows does not pass and gives the expected reason, in a run of the cpu profile whose rows all
pass in the unchanged copy. Ends with 1 where a defect was not noticed, or a healthy run did not pass.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from planted_defects import EIGHT, KNOWN, Defect, Edit
from planted_invented import INVENTED

DEFECTS = (*KNOWN, *INVENTED)
ROOT = Path(__file__).resolve().parents[1]
COPIED = ("nsa", "runbook", "phases", "reports", "templates", "configs", "pyproject.toml")
HEALTHY = "(none)"
# Steps of a launch, as a share of the profile's; a long run has to be as long as it is.
SHORT = ("--protocol", "single", "--steps-scale", "0.2")
AT_LEAST_NAMED = 6


class AnchorError(ValueError):
    """A defect no longer fits the source: its text does not occur exactly once."""


@dataclass(frozen=True, kw_only=True)
class Noticed:
    """A required row that did not pass."""

    row: str
    outcome: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one run of the copy said. named: expected reasons that were found, by defect."""

    name: str
    phases: tuple[str, ...]
    verdict: str
    noticed_by: tuple[Noticed, ...]
    named: tuple[str, ...]
    good: bool
    seconds: float
    at: str


def broken_anchors(root: Path, defects: Sequence[Defect]) -> list[str]:
    """Every defect that does not fit the source in `root`, or does not leave it valid Python."""
    problems = []
    for defect in defects:
        texts: dict[str, str] = {}
        for edit in defect.edits:
            text = texts.setdefault(edit.path, (root / edit.path).read_text(encoding="utf-8"))
            if text.count(edit.old) != 1 or edit.old == edit.new:
                problems.append(f"{defect.name}: {edit.path} holds its text {text.count(edit.old)}x")
            texts[edit.path] = text.replace(edit.old, edit.new)
        for path, text in texts.items():
            try:
                ast.parse(text)
            except SyntaxError as error:
                problems.append(f"{defect.name}: {path} would not be Python: {error}")
    return problems


class Copy:
    """A copy of the packages, in which one defect at a time is in force."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                leave = shutil.ignore_patterns("__pycache__")
                shutil.copytree(source, root / name, ignore=leave)
            else:
                shutil.copy2(source, root / name)
        self._edits = 0
        problems = broken_anchors(root, [*DEFECTS, EIGHT])
        if problems:
            raise AnchorError("\n".join(problems))

    @contextmanager
    def injected(self, edits: Sequence[Edit]) -> Iterator[None]:
        """The edits are in the copy within."""
        kept = {edit.path: (self.root / edit.path).read_bytes() for edit in edits}
        try:
            for edit in edits:
                path = self.root / edit.path
                text = path.read_text(encoding="utf-8")
                if text.count(edit.old) != 1:
                    raise AnchorError(f"{edit.path} holds the text {text.count(edit.old)} times")
                self._write(path, text.replace(edit.old, edit.new).encode())
            yield
        finally:
            for name, data in kept.items():
                self._write(self.root / name, data)

    def _write(self, path: Path, data: bytes) -> None:
        """Python recompiles a file by its second and size: every version gets a second of its own."""
        path.write_bytes(data)
        self._edits += 1
        moment = 1_000_000_000 + self._edits
        os.utime(path, (moment, moment))

    def environment(self) -> dict[str, str]:
        """What a run of the copy gets: the copy first on the path, no toggles of the caller."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("NSA_")}
        return {**kept, "PYTHONPATH": str(self.root), "OMP_NUM_THREADS": "1"}

    def run(self, defect: Defect, out: Path) -> dict[str, Any]:
        """run.json of the defect's phases. Raises RuntimeError where there is none."""
        with self.injected(defect.edits):
            words = ["--phase", ",".join(defect.phases), "--profile", "cpu", "--quiet"]
            words += [*(() if "long_run" in defect.phases else SHORT), "--out", str(out)]
            done = subprocess.run(
                [sys.executable, "-P", "-m", "runbook", "run", *words],
                cwd=self.root,
                env=self.environment(),
                capture_output=True,
                text=True,
                check=False,
            )
        found = list(out.glob("*/run.json"))
        if len(found) != 1:
            raise RuntimeError(f"{defect.name}: exit code {done.returncode}\n{done.stderr[-2000:]}")
        record: dict[str, Any] = json.loads(found[0].read_text(encoding="utf-8"))
        return record


def not_passed(record: dict[str, Any], phases: Sequence[str]) -> tuple[Noticed, ...]:
    """Required rows of these phases that are not PASS."""
    return tuple(
        Noticed(row=row["id"], outcome=row["outcome"], reason=row["reason"])
        for phase in record["phases"]
        if phase["name"] in phases
        for row in phase["checks"]
        if row["required"] and row["outcome"] != "PASS"
    )


def judge(defect: Defect, record: dict[str, Any]) -> tuple[tuple[Noticed, ...], list[str], bool]:
    """Rows that did not pass, the expected reasons found in them, and: is that as it should be?"""
    rows = not_passed(record, defect.phases)
    if not defect.edits:
        return rows, [], not rows
    reasons = " ".join(row.reason for row in rows if row.row in defect.rows)
    named = [text for text in defect.says if re.search(text, reasons)]
    if defect is EIGHT:
        return rows, named, record["verdict"] == "NO-GO" and len(named) >= AT_LEAST_NAMED
    missing = set(defect.rows) - {row.row for row in rows}
    # A run that only crashed, or was not run, says nothing about what was to be noticed.
    return rows, named, not missing and len(named) == len(defect.says)


class Bench:
    """Runs defects one after the other, and keeps what they gave in a folder."""

    def __init__(self, copy: Copy, results: Path, scratch: Path) -> None:
        self.copy, self.results, self.scratch = copy, results, scratch
        digest = hashlib.sha256()
        for path in sorted(p for p in copy.root.rglob("*") if p.is_file() and p.suffix != ".pyc"):
            digest.update(path.relative_to(copy.root).as_posix().encode() + path.read_bytes())
        self._source = digest.hexdigest()
        results.mkdir(parents=True, exist_ok=True)

    def result(self, defect: Defect) -> Result:
        """The kept result of this defect in this source, or that of a run now."""
        key = hashlib.sha256(f"{defect!r} {self._source}".encode()).hexdigest()[:16]
        path = self.results / f"{key}.json"
        if path.exists():
            kept = json.loads(path.read_text(encoding="utf-8"))
            rows = tuple(Noticed(**row) for row in kept.pop("noticed_by"))
            lists = {name: tuple(kept.pop(name)) for name in ("phases", "named")}
            return Result(noticed_by=rows, **lists, **kept)
        out = self.scratch / key
        begin = time.monotonic()
        record = self.copy.run(defect, out)
        rows, named, good = judge(defect, record)
        result = Result(
            name=defect.name,
            phases=defect.phases,
            verdict=record["verdict"],
            noticed_by=rows,
            named=tuple(named),
            good=good,
            seconds=round(time.monotonic() - begin, 1),
            at=datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        )
        path.write_text(json.dumps(asdict(result), indent=1) + "\n", encoding="utf-8")
        shutil.rmtree(out)
        return result


def healthy(defects: Sequence[Defect]) -> list[Defect]:
    """For each set of phases the unchanged copy: its rows have to pass."""
    sets = dict.fromkeys(defect.phases for defect in defects)
    return [
        Defect(name=HEALTHY, area="", what="nothing is changed", edits=(), phases=phases)
        for phases in sets
    ]


def line(result: Result) -> str:
    """A row of the table."""
    rows = ", ".join(f"`{row.row}`" for row in result.noticed_by) or "nothing"
    word = "yes" if result.good else "NO"
    if not result.noticed_by and result.name == HEALTHY:
        word = "healthy"
    return f"| {result.name} | {', '.join(result.phases)} | {rows} | {word} |"


def show(defects: Sequence[Defect]) -> None:
    """Names, phases, expected rows and reasons."""
    for defect in defects:
        print(f"{defect.name} [{defect.area}]: {defect.what}")
        print(f"    {', '.join(defect.phases)} -> {', '.join(defect.rows)}: {' + '.join(defect.says)}")


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks/planted.py")
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--all-at-once", action="store_true")
    parser.add_argument("--results", type=Path, default=ROOT / "artifacts" / "planted")
    asked = parser.parse_args(words)
    unknown = set(asked.only) - {defect.name for defect in DEFECTS}
    if unknown:
        parser.error(f"no such defect: {', '.join(sorted(unknown))}; see --list")
    return asked


def main(words: Sequence[str] | None = None) -> int:
    asked = parse(words)
    chosen = [d for d in DEFECTS if d.name in asked.only] if asked.only else list(DEFECTS)
    if asked.all_at_once:
        chosen = [EIGHT]
    if asked.list:
        show(chosen)
        return 0
    found: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="planted-") as name:
        scratch = Path(name)
        bench = Bench(Copy(scratch / "copy"), asked.results, scratch)
        for defect in [*healthy(chosen), *chosen]:
            found.append(bench.result(defect))
            if not asked.json:
                print(line(found[-1]), flush=True)
    if asked.json:
        print(json.dumps([asdict(result) for result in found], indent=1))
    bad = [result.name for result in found if not result.good]
    injected = [result for result in found if result.name != HEALTHY]
    noticed = sum(result.good for result in injected)
    print(f"{noticed} of {len(injected)} noticed; not as it should be: {', '.join(bad) or 'none'}",
          file=sys.stderr)  # fmt: skip
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
