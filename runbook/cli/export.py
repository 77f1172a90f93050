"""`runbook export`: a run's numbers where a user keeps numbers."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from runbook.cli._parser import Command, CommandParser, add_run, not_in_a_run
from runbook.cli.finished import find_run, load_told, refuse_changed
from runbook.console import Console
from runbook.errors import ProgramExit, did_you_mean

if TYPE_CHECKING:
    from runbook.records import RunRecord

_STDOUT = "-"
# node_exporter reads no other file.
_COLLECTED = ".prom"


def _csv(record: RunRecord) -> str:
    from runbook.tools.export import csv_text

    return csv_text(record)


def _prometheus(record: RunRecord) -> str:
    from runbook.tools.export import prometheus_text

    return prometheus_text(record)


FORMATS: dict[str, Callable[[RunRecord], str]] = {"csv": _csv, "prometheus": _prometheus}
_KNOWN = ", ".join(FORMATS)


def _add_arguments(parser: CommandParser) -> None:
    add_run(parser)
    parser.add_argument(
        "--to", nargs=2, action="append", default=[], metavar=("FORMAT", "PATH"),
        help="csv FILE or prometheus FILE.prom; - is stdout; repeatable; needed, no default",
    )  # fmt: skip


def _problems(args: argparse.Namespace) -> list[str]:
    if not args.to:
        needed = f"--to is needed, for example --to csv numbers.csv; formats: {_KNOWN}"
        return [] if args.misread else [needed]
    return [text for name, target in args.to if (text := _problem(name, target))]


def _problem(name: str, target: str) -> str:
    """What is wrong with one --to; empty if nothing is. Found before anything is written."""
    if name not in FORMATS:
        return f"--to {name}: no such format{did_you_mean(name, FORMATS)}; there are: {_KNOWN}"
    path = Path(target)
    if target == _STDOUT:
        return ""
    if name == "prometheus" and path.suffix != _COLLECTED:
        return f"--to prometheus {target}: the collector reads only files that end in {_COLLECTED}"
    if path.is_dir():
        return f"--to {name} {target}: is a folder; name a file in it"
    if not path.parent.is_dir():
        return f"--to {name} {target}: no folder {path.parent}/"
    return next(iter(not_in_a_run(f"--to {name}", path)), "")


def _export(args: argparse.Namespace, console: Console) -> int:
    from runbook.files import write_atomic, written_to

    folder = find_run(args.run_name, args.out)
    refuse_changed(folder, "nothing is exported of it")
    record = load_told(folder, console)
    texts = [(name, target, FORMATS[name](record)) for name, target in args.to]
    for name, target, text in texts:
        if target != _STDOUT:
            with written_to(f"--to {name}", Path(target)):
                write_atomic(Path(target), text)
    if args.json:
        written = [{"format": name, "written": [target]} for name, target, _ in texts]
        document = {"schema_version": 1, "run_id": record.run_id, "exports": written}
        console.json_document(document)
        return ProgramExit.GO
    for _, target, text in texts:
        console.page(text.rstrip("\n") if target == _STDOUT else target)
    return ProgramExit.GO


EXPORT = Command(
    name="export",
    help="write a run's numbers as CSV or for Prometheus",
    description="""\
Write the numbers of a run (see docs/exporting.md). Changes nothing in the run.

csv         a row for each number: value, unit, n, spread, limit, outcome, file, digest
prometheus  a file for node_exporter's textfile collector, replaced at once: verdict,
            checks by outcome, durations, every number and every limit; needs the
            package prometheus-client: pip install 'nsa-runbook[prometheus]'""",
    examples="""\
  runbook export --to csv numbers.csv                      the newest run
  runbook export --to prometheus /var/lib/node_exporter/runbook.prom
  runbook export 20261121T010203Z-840303b --to csv -""",
    exits="0 written, 2 usage, or run.json changed since the run: nothing is written",
    json_help="the paths that were written, as one JSON document on stdout",
    add_arguments=_add_arguments,
    problems=_problems,
    run=_export,
)
