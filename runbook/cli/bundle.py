"""`runbook bundle`: a run to send on."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from runbook.cli._parser import Command, CommandParser, add_run, path_type
from runbook.cli.finished import find_run, load_run
from runbook.console import Console
from runbook.errors import ProgramExit

# Of a bundle's files; --json has all.
_LISTED = 5


def _size(size_bytes: int) -> str:
    size, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def _add_arguments(parser: CommandParser) -> None:
    add_run(parser)
    parser.add_argument(
        "--to", type=path_type, metavar="FILE", help="the archive (default: RUN.tar.gz here)"
    )
    parser.add_argument(
        "--blank-secrets", action="store_true", help="blank what looks like one, and name it"
    )


def _bundle(args: argparse.Namespace, console: Console) -> int:
    from runbook.tools.bundle import write_bundle

    folder = find_run(args.run_name, args.out)
    record = load_run(folder)
    path = args.to or Path(f"{record.run_id}.tar.gz")
    made = write_bundle(record, folder, path, blank=args.blank_secrets)
    if args.json:
        document = {"schema_version": 1, **asdict(made), "path": str(made.path)}
        console.json_document(document)
        return ProgramExit.GO
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
    return ProgramExit.GO


BUNDLE = Command(
    name="bundle",
    help="pack a finished run into one file to send on",
    description="""\
Write a finished run as one .tar.gz, the same bytes each time. Every file is searched
for secrets again: one is refused, or blanked and named. Unpacked anywhere, `runbook
verify` and `report` work on it. The largest files are listed; --json lists all.""",
    examples="""\
  runbook bundle                               the newest run, to RUN.tar.gz
  runbook bundle 20261121T010203Z-840303b --to for_review.tar.gz""",
    exits="0 written, 2 usage, or a secret was found and nothing was written",
    add_arguments=_add_arguments,
    run=_bundle,
)
