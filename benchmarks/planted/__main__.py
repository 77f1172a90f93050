"""Defects injected one at a time into a copy, each run for real: python -m benchmarks.planted

    --only NAME        this defect (repeatable); "eight at once": those that once gave GO together
    --results DIR      finished results are kept here and not run again (default artifacts/planted)

A defect is noticed if each of its rows does not pass and gives the expected reason (and, where it
names a remedy, that one), in a run with the cpu profile in which the unchanged copy passes every
required row. The exit code is 1 where a defect was not noticed, or the unchanged copy did not pass.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.planted.copy import ALL_AT_ONCE, ROOT, Copy, Defect, load, load_all, run_in
from benchmarks.program import append_line, read_lines
from runbook.files import utc_text

DEFECTS = load_all()
(EIGHT,) = load(ALL_AT_ONCE)
HEALTHY = "(none)"
# One launch of some sixty steps, where a phase needs no more.
SHORT = ("--protocol", "single", "--steps-scale", "0.2")
CUT_SHORT = frozenset(("preflight", "baseline", "single_gpu"))
# Of the eight reasons, so many have to be found.
AT_LEAST_NAMED = 6


# A row as run.json has it.
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one run of the copy said. key: of the defect in this source; noticed_by: row ids."""

    key: str
    name: str
    noticed_by: Sequence[str]
    good: bool
    seconds: float


def run(copy: Copy, defect: Defect, out: Path) -> dict[str, Any]:
    """run.json of the defect's phases in the copy. Raises RuntimeError where there is none."""
    length = SHORT if set(defect.phases) <= CUT_SHORT else ()
    words = ("--phase", ",".join(defect.phases), "--profile", "cpu", "--quiet", *length)
    with copy.injected(defect.edits):
        done = run_in(copy.root, "-P", "-m", "runbook", "run", *words, "--out", str(out))
    found = list(out.glob("*/run.json"))
    if len(found) != 1:
        raise RuntimeError(f"{defect.name}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    record: dict[str, Any] = json.loads(found[0].read_text(encoding="utf-8"))
    return record


def not_passed(record: dict[str, Any], phases: Sequence[str]) -> list[Row]:
    """Required rows of these phases that are not PASS."""
    return [
        row
        for phase in record["phases"]
        if phase["name"] in phases
        for row in phase["checks"]
        if row["required"] and row["outcome"] != "PASS"
    ]


def judge(defect: Defect, record: dict[str, Any]) -> tuple[list[Row], list[str], bool]:
    """Rows that did not pass, the expected reasons found in them, and: is that as it should be?"""
    rows = not_passed(record, defect.phases)
    if not defect.edits:
        return rows, [], not rows
    wanted = [row for row in rows if row["id"] in defect.rows]
    reasons = " ".join(row["reason"] for row in wanted)
    named = [text for text in defect.says if re.search(text, reasons)]
    if defect is EIGHT:
        return rows, named, record["verdict"] == "NO-GO" and len(named) >= AT_LEAST_NAMED
    remedies = " ".join(row["remedy"] or "" for row in wanted)
    # A run that only crashed, or was not run, says nothing about what was to be noticed.
    found = len(wanted) == len(defect.rows) and len(named) == len(defect.says)
    return rows, named, found and bool(re.search(defect.remedy, remedies))


class Bench:
    """Runs defects one after the other, and keeps what they gave in a folder."""

    def __init__(self, copy: Copy, results: Path, scratch: Path) -> None:
        self.copy, self.scratch, self._path = copy, scratch, results / "results.jsonl"
        digest = hashlib.sha256()
        for path in sorted(p for p in copy.root.rglob("*") if p.is_file() and p.suffix != ".pyc"):
            digest.update(path.relative_to(copy.root).as_posix().encode() + path.read_bytes())
        self._source = digest.hexdigest()
        results.mkdir(parents=True, exist_ok=True)
        self._kept = {row["key"]: row for row in read_lines(self._path)}

    def result(self, defect: Defect) -> Result:
        """The kept result of this defect in this source, or that of a run now."""
        key = hashlib.sha256(f"{defect!r} {self._source}".encode()).hexdigest()[:16]
        if key in self._kept:
            return Result(**self._kept[key])
        out = self.scratch / key
        begin = time.monotonic()
        rows, _, good = judge(defect, run(self.copy, defect, out))
        seconds = round(time.monotonic() - begin, 1)
        result = Result(
            key=key, name=defect.name, noticed_by=[row["id"] for row in rows], good=good,
            seconds=seconds,
        )  # fmt: skip
        append_line(self._path, asdict(result))
        shutil.rmtree(out)
        return result


def healthy(defects: Sequence[Defect]) -> list[Defect]:
    """For each set of phases the unchanged copy: its rows have to pass."""
    sets = dict.fromkeys(defect.phases for defect in defects)
    return [
        Defect(name=HEALTHY, area="", what=f"{', '.join(phases)}", edits=(), phases=phases)
        for phases in sets
    ]


def line(defect: Defect, result: Result) -> str:
    """A row of the table: defect, what it is, noticed by, verdict."""
    rows = ", ".join(f"`{row}`" for row in result.noticed_by) or "nothing"
    word = "yes" if result.good else "NO"
    if not result.noticed_by and result.name == HEALTHY:
        word = "healthy"
    return f"| {result.name} | {defect.what} | {rows} | {word} |"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planted")
    names = {defect.name: defect for defect in (*DEFECTS, EIGHT)}
    parser.add_argument("--only", action="append", choices=names, metavar="NAME")
    parser.add_argument("--results", type=Path, default=ROOT / "artifacts" / "planted")
    asked = parser.parse_args(words)
    chosen = [names[name] for name in asked.only] if asked.only else list(DEFECTS)
    bad, noticed = [], 0
    with tempfile.TemporaryDirectory(prefix="planted-") as name:
        scratch = Path(name)
        copy = Copy(scratch / "copy")
        copy.check(list(names.values()))
        bench = Bench(copy, asked.results, scratch)
        for defect in [*healthy(chosen), *chosen]:
            result = bench.result(defect)
            print(line(defect, result), flush=True)
            noticed += result.good and result.name != HEALTHY
            bad += [] if result.good else [result.name]
    wrong = f"not as it should be: {', '.join(bad) or 'none'}"
    machine = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {utc_text()}"
    print(f"{noticed} of {len(chosen)} noticed; {wrong} ({machine})", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
