"""`runbook drill`: inject real faults into real runs and see whether they are noticed."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from runbook.cli._parser import command, option_table
from runbook.console import Console
from runbook.defaults import DEFAULT_OUT
from runbook.errors import ProgramExit

if TYPE_CHECKING:
    from runbook.tools.drill.faults import Fault
    from runbook.tools.drill.runner import DrillReport, DrillRow


_HEADER = ("FAULT", "NOTICED", "CULPRIT", "SECONDS", "ALLOWED", "EVIDENCE", "ORPHANS", "LOST", "OK")


_ARGUMENTS = option_table(
    """
    --faults LIST  comma-separated names, or all (default)
    --list         list the faults and stop
    --out DIR      new folder (default: artifacts/drill-<time>)
    """,
    faults="all",
    out={"default": None},
)


@command(
    "inject faults into real two-rank runs: is each noticed, named and cleaned up?",
    arguments=_ARGUMENTS,
)
def drill(args: argparse.Namespace, console: Console) -> int:
    """Inject each fault into a real run of the trainer on two CPU ranks, with budgets of 3 s:
    crashes, hangs, frozen ranks, desynchronized collectives, stragglers, data stalls,
    bad numbers, full memory and disks, torn files, clock jumps, taken ports, killed
    launchers. A row passes if the fault was noticed in time, the right rank was named,
    the evidence is there, no process is left and no written row is lost.

    examples:
      runbook drill --list
      runbook drill --faults frozen,sigkill,nan
      runbook drill --json > drill.json
    exit codes: 0 every row passed, 1 a row failed, 2 usage, 3 interrupted
    """
    from runbook.files import utc_stamp
    from runbook.launch import StopRequest, stop_on_signals
    from runbook.tools.drill.faults import select
    from runbook.tools.drill.runner import run_drill

    faults = select(args.faults)
    if args.list:
        _list(console, faults, as_json=args.json)
        return 0
    out = args.out or Path(DEFAULT_OUT) / f"drill-{utc_stamp()}"
    total, done = len(faults), 0

    def told(row: DrillRow) -> None:
        nonlocal done
        done += 1
        word = "good" if row.ok else "FAILED: " + "; ".join(row.problems)
        took = "" if row.seconds is None else f" {row.seconds:.2f} s"
        console.progress(f"[{done}/{total}] {row.fault}{took} {word}")

    with stop_on_signals(StopRequest()) as stop:
        report = run_drill(faults, out.resolve(), stop=stop, on_row=told)
    _print(console, report, as_json=args.json)
    if report.interrupted:
        return ProgramExit.INCOMPLETE
    return ProgramExit.GO if report.ok else ProgramExit.NO_GO


def _list(console: Console, faults: Sequence[Fault], *, as_json: bool) -> None:
    if as_json:
        rows = [{"fault": f.name, "title": f.title, "limit_s": f.limit_s} for f in faults]
        console.json_document({"schema_version": 1, "faults": rows})
    else:
        cells = [(f.name, f.status.value, f"{f.limit_s:g} s", f.title) for f in faults]
        console.table(("FAULT", "ENDS AS", "WITHIN", "WHAT IS INJECTED"), cells)


def _print(console: Console, report: DrillReport, *, as_json: bool) -> None:
    summary = report.summary()
    if as_json:
        rows = [row.document() for row in report.rows]
        console.json_document({"schema_version": 1, "summary": summary, "rows": rows})
        return
    console.table(_HEADER, [_cells(row) for row in report.rows])
    for row in report.rows:
        if not row.ok:
            console.result(f"{row.fault}: {'; '.join(row.problems)} ({row.cause})")
    text = (
        "{good} of {faults} good ({kinds} kinds); culprit right {culprit_right} of {culprit_of}; "
        "after the threshold {median_over_threshold_s} s median, {max_over_threshold_s} s at most; "
        "{orphans} orphans, {rows_lost} rows lost"
    )
    console.result(text.format_map(summary))


def _cells(row: DrillRow) -> tuple[str, ...]:
    return (
        row.fault,
        "yes" if row.detected else "NO",
        "yes" if row.culprit_right else "NO",
        "-" if row.seconds is None else f"{row.seconds:.2f}",
        "-" if row.limit_s is None else f"{row.limit_s:g}",
        str(len(row.evidence)),
        str(row.orphans),
        str(row.rows_lost),
        "yes" if row.ok else "NO",
    )
