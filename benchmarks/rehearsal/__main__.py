"""`python -m benchmarks.rehearsal`: judge every rehearsed machine. NOT A MEASUREMENT.

    --machine NAME     only this one (repeatable)
    --profile NAME     only machines judged by this profile
    --list             names and stories; judges nothing
    --json             the results as JSON
    --write FILE       put the table into this page, between its marks
    --keep DIR         keep the runs there
    --workers N        processes (default 2)

Exits with 1 where a machine is not judged as it should be, and 2 for wrong options.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from benchmarks.program import put_between
from benchmarks.rehearsal.catalog import MACHINES
from benchmarks.rehearsal.judged import Judged, judge
from benchmarks.rehearsal.machine import Machine
from benchmarks.rehearsal.table import BEGIN, END, NOTICE, page_table, screen


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    options = _options(words)
    chosen = [
        machine
        for machine in MACHINES
        if (not options.machine or machine.name in options.machine)
        and options.profile in (None, machine.profile)
    ]
    known = {machine.name for machine in MACHINES}
    unknown = sorted(set(options.machine) - known)
    if unknown or not chosen:
        print(f"no such machine: {', '.join(unknown) or 'none left'}; see --list", file=sys.stderr)
        return 2
    if options.list:
        for machine in chosen:
            print(f"{machine.name:22} {machine.profile:14} {machine.story}")
        return 0
    results = _all(chosen, options.workers, options.keep)
    if options.json:
        print(json.dumps([_plain(result) for result in results], indent=1))
    else:
        print(screen(results))
    if options.write:
        put_between(options.write, BEGIN, END, page_table(results))
    return 0 if all(result.as_expected for result in results) else 1


def _options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rehearsal", description=NOTICE)
    parser.add_argument("--machine", action="append", default=[], metavar="NAME")
    parser.add_argument("--profile", metavar="NAME")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", type=Path, metavar="FILE")
    parser.add_argument("--keep", type=Path, metavar="DIR")
    parser.add_argument("--workers", type=int, default=2, metavar="N")
    return parser.parse_args(words)


def _all(machines: Sequence[Machine], workers: int, keep: Path | None) -> list[Judged]:
    """Every machine judged, in the order of the catalog, each told on stderr as it is done."""
    one = partial(_one, keep=keep)
    if workers < 2 or len(machines) < 2:
        return [one(machine) for machine in machines]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with ProcessPoolExecutor(max_workers=workers) as pool:
        return list(pool.map(one, machines))


def _one(machine: Machine, *, keep: Path | None) -> Judged:
    result = judge(machine, keep=keep / machine.name if keep else None)
    word = "as expected" if result.as_expected else "NOT AS EXPECTED"
    text = f"{machine.name}: {result.verdict}, {word} ({result.seconds:.0f} s)\n"
    if not result.as_expected:
        text += "".join(f"    {row} {why[:200]}\n" for row, why in result.reasons.items())
    sys.stderr.write(text)
    return result


def _plain(result: Judged) -> dict[str, object]:
    return {
        "machine": result.machine.name,
        "profile": result.machine.profile,
        "verdict": result.verdict,
        "stopped_by": list(result.stopped_by),
        "should": list(result.machine.stopped_by),
        "as_expected": result.as_expected,
        "reasons": dict(result.reasons),
        "launches": result.started,
        "notice": NOTICE,
    }


if __name__ == "__main__":
    sys.exit(main())
