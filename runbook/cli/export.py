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


def _csv(record: RunRecord, _folder: Path, target: str) -> list[str]:
    from runbook.tools.export.numbers import csv_text

    return _write(csv_text(record), target)


def _prometheus(record: RunRecord, _folder: Path, target: str) -> list[str]:
    from runbook.tools.export.prometheus import prometheus_text

    return _write(prometheus_text(record), target)


def _tensorboard(record: RunRecord, folder: Path, target: str) -> list[str]:
    from runbook.tools.export.tensorboard import write_tensorboard

    return [str(path) for path in write_tensorboard(record, folder, Path(target))]


def _write(text: str, target: str) -> list[str]:
    """Replace the file at once and name it; on stdout the text is all there is."""
    if target == _STDOUT:
        return [text.rstrip("\n")]
    from runbook.files import write_atomic

    write_atomic(Path(target), text)
    return [target]


FORMATS: dict[str, Callable[[RunRecord, Path, str], list[str]]] = {
    "csv": _csv,
    "prometheus": _prometheus,
    "tensorboard": _tensorboard,
}
_KNOWN = ", ".join(FORMATS)


def _add_arguments(parser: CommandParser) -> None:
    add_run(parser)
    parser.add_argument(
        "--to", nargs=2, action="append", default=[], metavar=("FORMAT", "PATH"),
        help="csv FILE, prometheus FILE.prom or tensorboard DIR; - is stdout; repeatable; needed, "
        "no default",
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
    if name == "tensorboard":
        odd = target == _STDOUT or Path(target).is_file()
        return f"--to tensorboard {target}: needs a folder" if odd else ""
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
    from runbook.files import written_to

    folder = find_run(args.run_name, args.out)
    refuse_changed(folder, "nothing is exported of it")
    record = load_told(folder, console)
    written = []
    for name, target in args.to:
        with written_to(f"--to {name}", Path(target)):
            paths = FORMATS[name](record, folder, target)
        written.append({"format": name, "written": paths})
    if args.json:
        document = {"schema_version": 1, "run_id": record.run_id, "exports": written}
        console.json_document(document)
    else:
        for one in written:
            console.page("\n".join(one["written"]))
    return ProgramExit.GO


EXPORT = Command(
    name="export",
    help="write a run's numbers as CSV, for Prometheus, or for TensorBoard",
    description="""\
Write the numbers of a run (see docs/exporting.md). Changes nothing in the run.

csv         a row for each number: value, unit, n, spread, limit, outcome, file, digest
prometheus  a file for node_exporter's textfile collector, replaced at once: verdict,
            checks by outcome, durations, every number and every limit
tensorboard DIR/RUN: the curves of every launch, the checks' numbers, the verdict; needs
            the package tensorboard: pip install 'nsa-runbook[tensorboard]'""",
    examples="""\
  runbook export --to csv numbers.csv                      the newest run
  runbook export --to prometheus /var/lib/node_exporter/runbook.prom
  runbook export 20261121T010203Z-840303b --to tensorboard boards --to csv -""",
    exits="0 written, 2 usage, or run.json changed since the run: nothing is written",
    json_help="the paths that were written, as one JSON document on stdout",
    add_arguments=_add_arguments,
    problems=_problems,
    run=_export,
)
