"""Defects injected one at a time into a copy, each run for real: python -m benchmarks.planted

    --list             names, phases and what must notice; runs nothing
    --only NAME        this defect (repeatable)
    --all-at-once      the eight that once gave GO together
    --json             results as JSON instead of the table
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
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.planted.copy import ALL_AT_ONCE, ROOT, Copy, Defect, load, load_all, of_copy

DEFECTS = load_all()
(EIGHT,) = load(ALL_AT_ONCE)
HEALTHY = "(none)"
# One launch of some sixty steps, where a phase needs no more.
SHORT = ("--protocol", "single", "--steps-scale", "0.2")
CUT_SHORT = frozenset(("preflight", "baseline", "single_gpu"))
# Of the eight reasons, so many have to be found.
AT_LEAST_NAMED = 6


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


def run(copy: Copy, defect: Defect, out: Path) -> dict[str, Any]:
    """run.json of the defect's phases in the copy. Raises RuntimeError where there is none."""
    length = SHORT if set(defect.phases) <= CUT_SHORT else ()
    words = ("--phase", ",".join(defect.phases), "--profile", "cpu", "--quiet", *length)
    with copy.injected(defect.edits):
        done = subprocess.run(
            [sys.executable, "-P", "-m", "runbook", "run", *words, "--out", str(out)],
            cwd=copy.root,
            env=of_copy(copy.root),
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


def remedies(record: dict[str, Any], rows: Sequence[str]) -> str:
    """What these rows tell to do."""
    checks = [row for phase in record["phases"] for row in phase["checks"]]
    return " ".join(row.get("remedy") or "" for row in checks if row["id"] in rows)


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
    if defect.remedy and not re.search(defect.remedy, remedies(record, defect.rows)):
        return rows, named, False
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
            kept["noticed_by"] = tuple(Noticed(**row) for row in kept["noticed_by"])
            for name in ("phases", "named"):
                kept[name] = tuple(kept[name])
            return Result(**kept)
        out = self.scratch / key
        begin = time.monotonic()
        record = run(self.copy, defect, out)
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
        Defect(name=HEALTHY, area="", what=f"{', '.join(phases)}", edits=(), phases=phases)
        for phases in sets
    ]


def line(defect: Defect, result: Result) -> str:
    """A row of the table: defect, what it is, noticed by, verdict."""
    rows = ", ".join(f"`{row.row}`" for row in result.noticed_by) or "nothing"
    word = "yes" if result.good else "NO"
    if not result.noticed_by and result.name == HEALTHY:
        word = "healthy"
    return f"| {result.name} | {defect.what} | {rows} | {word} |"


def show(defects: Sequence[Defect]) -> None:
    """Names, phases, expected rows and reasons."""
    for defect in defects:
        print(f"{defect.name} [{defect.area}]: {defect.what}")
        says = " + ".join(defect.says)
        print(f"    {', '.join(defect.phases)} -> {', '.join(defect.rows)}: {says}")


def machine_line() -> str:
    """This machine, how busy it is, and the day: what stands with every measured table."""
    load = os.getloadavg()[0]
    return f"{os.cpu_count()} cores, load {load:.1f}, {datetime.now(UTC):%d %B %Y}"


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planted")
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
        copy = Copy(scratch / "copy")
        copy.check([*DEFECTS, EIGHT])
        bench = Bench(copy, asked.results, scratch)
        for defect in [*healthy(chosen), *chosen]:
            found.append(bench.result(defect))
            if not asked.json:
                print(line(defect, found[-1]), flush=True)
    if asked.json:
        print(json.dumps([asdict(result) for result in found], indent=1))
    bad = [result.name for result in found if not result.good]
    injected = [result for result in found if result.name != HEALTHY]
    noticed = sum(result.good for result in injected)
    wrong = f"not as it should be: {', '.join(bad) or 'none'}"
    print(f"{noticed} of {len(injected)} noticed; {wrong} ({machine_line()})", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
