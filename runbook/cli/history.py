"""`runbook history [METRIC]`: earlier runs, or one number through all of them."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from runbook.cli._parser import Command, CommandParser, add_out
from runbook.console import Console
from runbook.errors import RunbookError, UsageError, did_you_mean

if TYPE_CHECKING:
    from runbook.engine.history import MetricRow

_COLUMNS = ("started_at", "run_id", "profile", "outcome", "number", "stdev", "n", "unit", "path")


def _add_arguments(parser: CommandParser) -> None:
    parser.add_argument(
        "metric",
        nargs="?",
        metavar="METRIC",
        help="a check or a measurement (default: list the runs)",
    )
    add_out(parser)
    parser.add_argument("--csv", action="store_true", help="METRIC as comma-separated rows")


def _history(args: argparse.Namespace, console: Console) -> int:
    import sqlite3

    if not args.out.is_dir():
        raise UsageError(
            f"no folder {args.out}/", hint="`runbook run` creates it, --out names another"
        )
    if args.csv and args.metric is None:
        raise UsageError("--csv needs a METRIC", hint="for example: baseline.throughput")
    try:
        if args.metric is None:
            _show_runs(console, args.out, as_json=args.json)
        else:
            _show_metric(console, args)
    except sqlite3.OperationalError as error:
        raise RunbookError(f"the index in {args.out}/ cannot be used: {error}") from error
    return 0


def _show_runs(console: Console, out: Path, *, as_json: bool) -> None:
    from runbook.engine.history import list_runs

    rows = list_runs(out)
    if as_json:
        console.json_document({"schema_version": 1, "runs": [asdict(row) for row in rows]})
        return
    cells = [
        (
            row.started_at or "-",
            row.run_id,
            row.profile or "-",
            row.verdict or "-",
            f"{row.passed} of {row.required}",
            row.problem or ("interrupted" if row.interrupted else ""),
        )
        for row in rows
    ]
    console.table(("STARTED", "RUN", "PROFILE", "VERDICT", "REQUIRED PASSED", ""), cells)


def _show_metric(console: Console, args: argparse.Namespace) -> None:
    from runbook.engine.history import metric_names, metric_rows

    rows = metric_rows(args.out, args.metric)
    if not rows:
        names = metric_names(args.out)
        known = f"there are: {', '.join(names)}" if names else "no run has recorded any"
        raise UsageError(
            f"no metric {args.metric!r} in {args.out}/{did_you_mean(args.metric, names)}",
            hint=known,
        )
    if args.csv:
        console.result(_csv(rows))
    elif args.json:
        document = {"schema_version": 1, "metric": args.metric}
        console.json_document({**document, "rows": [asdict(row) for row in rows]})
    else:
        header = ("STARTED", "RUN", "PROFILE", "OUTCOME", "VALUE", "N", "SOURCE")
        console.table(header, [_cells(row) for row in rows])


def _cells(row: MetricRow) -> tuple[str, ...]:
    value = row.text if row.number is None else f"{row.number:.6g}"
    spread = f" +- {row.stdev:.3g}" if row.stdev is not None else ""
    unit = f" {row.unit}" if row.unit else ""
    return (
        row.started_at,
        row.run_id,
        row.profile,
        row.outcome or "-",
        f"{value}{spread}{unit}",
        str(row.n),
        row.path or "-",
    )


def _csv(rows: list[MetricRow]) -> str:
    import csv
    import io

    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(_COLUMNS)
    writer.writerows([getattr(row, name) for name in _COLUMNS] for row in rows)
    return stream.getvalue().rstrip("\n")


HISTORY = Command(
    name="history",
    help="list earlier runs, or one number through all of them",
    description="""\
List the runs of a folder, oldest first; with METRIC (a check's id, or
phase/measurement), its value in each. The index is built from the run folders and
updates itself.""",
    examples="""\
  runbook history
  runbook history baseline.throughput
  runbook history baseline.throughput --csv > throughput.csv""",
    add_arguments=_add_arguments,
    run=_history,
)
