"""`runbook history [METRIC]`: earlier runs, or one number through all of them."""

from __future__ import annotations

import argparse
import csv
import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runbook.cli._common import DEFAULT_OUT
from runbook.cli._parser import add_output_flags
from runbook.console import Console, console_for, table
from runbook.errors import RunbookError, UsageError, did_you_mean

if TYPE_CHECKING:
    from runbook.engine.history import MetricRow


_COLUMNS = ("started_at", "run_id", "profile", "outcome", "number", "stdev", "n", "unit", "path")


def add_parser(subparsers: Any) -> None:
    """Add the sub-command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "history",
        help="list earlier runs, or one number through all of them",
        description=(
            "List the runs of a folder, oldest first; with METRIC (a check's id, or\n"
            "phase/measurement) its value in each. The index is made from the run folders and\n"
            "brought up to date by itself."
        ),
        epilog=(
            "examples:\n"
            "  runbook history\n"
            "  runbook history baseline.throughput\n"
            "  runbook history baseline.throughput --csv > throughput.csv"
        ),
    )
    parser.add_argument("metric", nargs="?", metavar="METRIC", help="a check or a measurement")
    parser.add_argument(
        "--out",
        default=DEFAULT_OUT,
        metavar="DIR",
        help=f"where run folders are looked for (default {DEFAULT_OUT})",
    )
    parser.add_argument("--csv", action="store_true", help="METRIC as comma-separated rows")
    add_output_flags(parser, json_help="one JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    """Print the list or the metric."""
    import sqlite3

    out_dir = Path(args.out)
    if not out_dir.is_dir():
        raise UsageError(
            f"no folder {out_dir}/", hint="`runbook run` makes it, --out names another"
        )
    if args.csv and args.metric is None:
        raise UsageError("--csv needs a METRIC", hint="for example: baseline.throughput")
    console = console_for(args)
    try:
        if args.metric is None:
            _show_runs(console, out_dir, as_json=args.json)
        else:
            _show_metric(console, out_dir, args)
    except sqlite3.OperationalError as error:
        raise RunbookError(f"the index in {out_dir}/ cannot be used: {error}") from error
    return 0


def _show_runs(console: Console, out_dir: Path, *, as_json: bool) -> None:
    from runbook.engine.history import list_runs

    rows = list_runs(out_dir)
    if as_json:
        console.json_document({"schema_version": 1, "runs": [asdict(row) for row in rows]})
        return
    header = ("STARTED", "RUN", "PROFILE", "VERDICT", "REQUIRED PASSED", "")
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
    console.result(table(header, cells))


def _show_metric(console: Console, out_dir: Path, args: argparse.Namespace) -> None:
    from runbook.engine.history import metric_names, metric_rows

    rows = metric_rows(out_dir, args.metric)
    if not rows:
        names = metric_names(out_dir)
        known = f"there are: {', '.join(names)}" if names else "no run has recorded any"
        raise UsageError(
            f"no metric {args.metric!r} in {out_dir}/{did_you_mean(args.metric, names)}", hint=known
        )
    if args.csv:
        console.result(_csv(rows))
    elif args.json:
        document = {"schema_version": 1, "metric": args.metric}
        console.result(json.dumps({**document, "rows": [asdict(row) for row in rows]}, indent=2))
    else:
        header = ("STARTED", "RUN", "PROFILE", "OUTCOME", "VALUE", "N", "SOURCE")
        console.result(table(header, [_cells(row) for row in rows]))


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
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(_COLUMNS)
    writer.writerows([getattr(row, name) for name in _COLUMNS] for row in rows)
    return stream.getvalue().rstrip("\n")
