"""`python -m benchmarks.rehearsal`: judge every rehearsed machine. NOT A MEASUREMENT.

    --machine NAME     only this one (repeatable)
    --write FILE       put the table into this page, between its marks
    --keep DIR         keep the runs there
    --workers N        processes (default 2)

Exits with 1 where a machine is not judged as it should be, and 2 for wrong options.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from benchmarks.program import markdown_table, put_between
from benchmarks.rehearsal.judged import Judged, judge
from benchmarks.rehearsal.machine import MACHINES, Machine

NOTICE = "A rehearsal on generated evidence: nothing in it was measured, and no GPU took part."
BEGIN, END = "<!-- rehearsal: begin -->", "<!-- rehearsal: end -->"
_SHOWN = 4


def stops(result: Judged) -> str:
    """The rows that stopped a machine: those that should have, then others with a cause.

    Rows that only lack evidence, because something else went wrong before, are not told.
    """
    own = [row for row in result.machine.stopped_by if row in result.stopped_by]
    others = [
        row
        for row in result.stopped_by
        if row not in own and not result.reasons[row].startswith("INCOMPLETE")
    ]
    shown = (own + others)[:_SHOWN] or list(result.stopped_by[:_SHOWN])
    more = ", ..." if len(own + others) > _SHOWN else ""
    return ", ".join(shown) + more if shown else "-"


def page_table(results: Sequence[Judged]) -> str:
    """The table of benchmarks/results/rehearsal.md."""
    header = ("machine", "profile", "what is wrong", "should be stopped by", "verdict",
              "stopped by")  # fmt: skip
    rows = []
    for result in results:
        machine = result.machine
        told = (f"`{machine.name}`", machine.profile, machine.story, should(machine))
        rows.append((*told, result.verdict, stops(result)))
    return markdown_table(header, rows).rstrip("\n")


def problem(result: Judged) -> str:
    """Why a machine is not judged as it should be."""
    why = [f"    {row} {result.reasons[row][:300]}" for row in result.stopped_by[:_SHOWN]]
    head = f"BAD {result.machine.name}: {result.verdict}; should be: {should(result.machine)}"
    return "\n".join([head, *why])


def should(machine: Machine) -> str:
    """The rows that have to stop it, or GO."""
    return ", ".join(machine.stopped_by) or "nothing: GO"


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rehearsal", description=NOTICE)
    names = [machine.name for machine in MACHINES]
    parser.add_argument("--machine", action="append", choices=names, metavar="NAME")
    parser.add_argument("--write", type=Path, metavar="FILE")
    parser.add_argument("--keep", type=Path, metavar="DIR")
    parser.add_argument("--workers", type=int, default=2, metavar="N")
    options = parser.parse_args(words)
    chosen = [one for one in MACHINES if one.name in (options.machine or names)]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with ProcessPoolExecutor(max_workers=options.workers) as pool:
        results = list(pool.map(partial(_one, keep=options.keep), chosen))
    print(page_table(results))
    bad = [problem(result) for result in results if not result.as_expected]
    print(*bad, sep="\n")
    print(
        f"{len(results) - len(bad)} of {len(results)} machines judged as they should be. {NOTICE}"
    )
    if options.write:
        put_between(options.write, BEGIN, END, page_table(results))
    return 1 if bad else 0


def _one(machine: Machine, *, keep: Path | None) -> Judged:
    """A machine judged, and told on stderr as soon as it is."""
    result = judge(machine, keep=keep / machine.name if keep else None)
    word = "as expected" if result.as_expected else "NOT AS EXPECTED"
    sys.stderr.write(f"{machine.name}: {result.verdict}, {word} ({result.seconds:.0f} s)\n")
    return result


if __name__ == "__main__":
    sys.exit(main())
