"""`runbook history [METRIC]`: earlier runs, or one number through all of them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from runbook.cli._parser import command
from runbook.console import Console, table_of
from runbook.errors import UsageError, choice_for

if TYPE_CHECKING:
    from rich.console import RenderableType

    from runbook.tools.export import MetricRow
    from runbook.tools.history import History, RunRow, Trend

_COLUMNS = (
    "started_at", "run_id", "profile", "line", "outcome", "value", "stdev", "n", "unit", "path",
)  # fmt: skip


def _problems(args: argparse.Namespace) -> list[str]:
    problems = []
    if args.csv and args.metric is None and not args.misread:
        problems.append("--csv needs a METRIC, for example: baseline.throughput")
    return problems


@command(
    "list earlier runs, or one number through all of them",
    problems=_problems,
)
def history(args: argparse.Namespace, console: Console) -> int:
    """List the runs of a folder, oldest first. With METRIC (a check's id, or
    phase/measurement), its value in each, a line for each profile, settings, workload and
    device, and the change against the median of the earlier runs on that line.

    options:
      metric [METRIC]  a check or a measurement (default: list the runs)
      --out DIR
      --csv            METRIC as comma-separated rows

    examples:
      runbook history
      runbook history baseline.throughput
      runbook history baseline.throughput --csv > throughput.csv
    """
    from runbook.tools.history import read_history

    if not args.out.is_dir():
        raise UsageError(
            f"no folder {args.out}/", hint="`runbook run` creates it, --out names another"
        )
    found = read_history(args.out)
    if args.metric is None:
        _show_runs(console, found.runs)
    else:
        _show_metric(console, args, found)
    return 0


def _show_runs(console: Console, rows: Sequence[RunRow]) -> None:
    from runbook.records.measurement import duration_text, plain_number

    cells = [
        (
            row.started_at or "-",
            row.run_id,
            row.profile or "-",
            row.verdict or "-",
            f"{row.passed} of {row.required}",
            "-" if row.duration_s is None else duration_text(row.duration_s),
            plain_number(row.throughput),
            "; ".join(row.marks),
        )
        for row in rows
    ]
    header = ("STARTED", "RUN", "PROFILE", "VERDICT", "REQUIRED PASSED", "TOOK", "TOK/S", "")
    document = {"schema_version": 2, "runs": [asdict(row) for row in rows]}
    console.tell(document, [table_of(header, cells, styled=3)])


def _show_metric(console: Console, args: argparse.Namespace, history: History) -> None:
    from runbook.records.measurement import json_ready
    from runbook.tools.export import csv_text
    from runbook.tools.history import trends

    rows = history.metric(args.metric)
    if not rows:
        names = history.names
        known = choice_for(args.metric, names) if names else "; no run has recorded any"
        raise UsageError(f"no metric {args.metric!r} in {args.out}/{known}")
    found = trends(rows)
    if args.csv:
        console.page(csv_text(rows, _COLUMNS))
        return
    document = {"schema_version": 3, "metric": args.metric}
    lines = [
        {"line": one.line, "on_what": one.on_what, "unit": one.unit, "rows": _json_rows(one)}
        for one in found
    ]
    parts = [part for one in found for part in ("", *_trend(one))]
    console.tell(json_ready({**document, "lines": lines}), parts[1:])


def _json_rows(trend: Trend) -> list[dict[str, object]]:
    changes = (None if one is None else one[0] for one in trend.changes())
    return [
        {**asdict(row), "change": change} for row, change in zip(trend.rows, changes, strict=True)
    ]


def _trend(trend: Trend) -> Iterator[RenderableType]:
    yield trend.title
    if len(trend.numbers) > 1:
        low, high = (f"{value:.6g}" for value in (min(trend.numbers), max(trend.numbers)))
        unit = f" {trend.unit}" if trend.unit else ""
        yield f"{low} to {high}{unit}, {len(trend.numbers)} runs, oldest first"
    header = ("STARTED", "RUN", "VERDICT", "OUTCOME", "VALUE", "N", "AGAINST EARLIER", "SOURCE")
    rows = zip(trend.rows, trend.changes(), strict=True)
    yield table_of(header, [_cells(row, change) for row, change in rows], styled=3)


def _cells(row: MetricRow, change: tuple[float, int] | None) -> tuple[str, ...]:
    value = row.text if row.number is None else f"{row.number:.6g}"
    spread = f" +- {row.stdev:.3g}" if row.stdev is not None else ""
    unit = f" {row.unit}" if row.unit else ""
    return (
        row.started_at,
        row.run_id,
        row.verdict,
        row.outcome or "-",
        f"{value}{spread}{unit}",
        str(row.n),
        "-" if change is None else f"{change[0]:+.1%} (median of {change[1]})",
        row.path or "-",
    )
