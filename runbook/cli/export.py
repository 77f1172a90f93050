"""`runbook export`: a run's numbers where a user keeps numbers, and the run as one file."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from runbook.cli._parser import command, file_problems, option_table
from runbook.cli._runs import find_run, refuse_changed
from runbook.console import Console
from runbook.errors import ProgramExit, choice_for

if TYPE_CHECKING:
    from runbook.records import RunRecord
    from runbook.tools.bundle import Bundle

_STDOUT = "-"
# node_exporter reads no other file.
_COLLECTED = ".prom"
_BUNDLE = "bundle"
# Of a bundle's files; --json has all.
_LISTED = 5


TEXTS = ("csv", "prometheus")
FORMATS = (*TEXTS, _BUNDLE)
_KNOWN = ", ".join(FORMATS)


_ARGUMENTS = option_table(
    """
    run_name [RUN]
    --out DIR
    --to FORMAT      csv FILE, prometheus FILE.prom or bundle FILE.tar.gz; - is stdout, but not for
                     a bundle; repeatable; needed, no default
    --blank-secrets  of a bundle: blank what looks like one, and name it
    """,
    to={"metavar": ("FORMAT", "PATH"), "nargs": 2, "action": "append", "default": []},
)


def _problems(args: argparse.Namespace) -> list[str]:
    if not args.to:
        needed = f"--to is needed, for example --to csv numbers.csv; formats: {_KNOWN}"
        return [] if args.misread else [needed]
    found = [text for name, target in args.to if (text := _problem(name, target))]
    if args.blank_secrets and _BUNDLE not in (name for name, _ in args.to):
        found.append("--blank-secrets is for --to bundle")
    return found


def _problem(name: str, target: str) -> str:
    """What is wrong with one --to; empty if nothing is. Found before anything is written."""
    if name not in FORMATS:
        return f"--to {name}: no such format{choice_for(name, FORMATS)}"
    path = Path(target)
    if target == _STDOUT:
        return "--to bundle -: name a file" if name == _BUNDLE else ""
    if name == "prometheus" and path.suffix != _COLLECTED:
        return f"--to prometheus {target}: the collector reads only files that end in {_COLLECTED}"
    return next(iter(file_problems(f"--to {name}", path)), "")


@command(
    "write a run's numbers as CSV or for Prometheus, or the run as one file",
    json_help="the paths that were written, as one JSON document on stdout",
    arguments=_ARGUMENTS,
    problems=_problems,
)
def export(args: argparse.Namespace, console: Console) -> int:
    """Write the numbers of a run, or all of it (see docs/exporting.md). Changes nothing in the run.

    csv         a row for each number: value, unit, n, spread, limit, outcome, file, digest
    prometheus  a file for node_exporter's textfile collector, replaced at once: verdict,
                checks by outcome, durations, every number and every limit; needs the
                package prometheus-client: pip install 'nsa-runbook[prometheus]'
    bundle      a finished run as one .tar.gz, the same bytes each time, which `runbook
                verify` and `report` take unpacked anywhere. Every file is searched for
                secrets again: one is refused, or blanked and named

    examples:
      runbook export --to csv numbers.csv                      the newest run
      runbook export --to prometheus /var/lib/node_exporter/runbook.prom
      runbook export 20261121T010203Z-840303b --to csv -
      runbook export --to bundle for_review.tar.gz
    exit codes: 0 written; 2 usage, run.json changed since the run, or a secret was found:
    nothing is written
    """
    from runbook.engine.intact import doubt
    from runbook.files import write_atomic, written_to
    from runbook.folder.manifest import load_record
    from runbook.tools.bundle import write_bundle
    from runbook.tools.export import csv_text, prometheus_text

    folder = find_run(args.run_name, args.out)
    record = load_record(folder)
    if any(name in TEXTS for name, _ in args.to):
        refuse_changed(folder, doubt(folder, record), "nothing is exported of it")
    makers = dict(zip(TEXTS, (csv_text, prometheus_text), strict=True))
    texts = [(name, target, makers[name](record)) for name, target in args.to if name in TEXTS]
    bundles = [
        write_bundle(record, folder, Path(target), blank=args.blank_secrets)
        for name, target in args.to
        if name == _BUNDLE
    ]
    for name, target, text in texts:
        if target != _STDOUT:
            with written_to(f"--to {name}", Path(target)):
                write_atomic(Path(target), text)
    if args.json:
        console.json_document(_document(record, args.to, bundles))
        return ProgramExit.GO
    for _, target, text in texts:
        console.page(text if target == _STDOUT else target)
    for made in bundles:
        _tell_bundle(console, made)
    return ProgramExit.GO


def _document(
    record: RunRecord, targets: Sequence[tuple[str, str]], bundles: Sequence[Bundle]
) -> dict[str, object]:
    packed = {str(one.path): {"bundle": asdict(one) | {"path": str(one.path)}} for one in bundles}
    written = [
        {"format": name, "written": [target]} | (packed[target] if name == _BUNDLE else {})
        for name, target in targets
    ]
    return {"schema_version": 1, "run_id": record.run_id, "exports": written}


def _tell_bundle(console: Console, made: Bundle) -> None:
    for text in made.changed:
        console.error(f"not as its manifest: {text}")
    largest = sorted(made.files, key=lambda one: one.size_bytes, reverse=True)
    rows = [(one.name, _size(one.size_bytes)) for one in largest[:_LISTED]]
    console.table(("LARGEST FILES", "SIZE"), rows)
    for one in made.blanked:
        lines = ", ".join(map(str, one.blanked))
        console.result(f"blanked  {one.name}: line {lines}; verify names this file")
    whole = sum(one.size_bytes for one in made.files)
    console.result(
        f"bundle  {made.path}  {_size(made.size_bytes)}, {len(made.files)} files of {_size(whole)}"
    )


def _size(size_bytes: int) -> str:
    size, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
