"""`runbook bundle` and `runbook prune`: a run to send on, and old runs to remove."""

from __future__ import annotations

import argparse
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from runbook.cli._parser import Command, CommandParser, add_out, add_run, path_type, whole_type
from runbook.cli.finished import find_run, load_run
from runbook.console import Console
from runbook.errors import ProgramExit, UsageError

# Of a bundle's files; --json has all.
_LISTED = 5

if TYPE_CHECKING:
    from datetime import timedelta

    from runbook.tools.prune import Candidate


def _size(size_bytes: int) -> str:
    size, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def _add_bundle(parser: CommandParser) -> None:
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
    add_arguments=_add_bundle,
    run=_bundle,
)

_UNITS = {"d": 1, "w": 7}


def _age(text: str) -> timedelta:
    from datetime import timedelta

    match = re.fullmatch(r"(\d{1,5})([dw])", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"must be like 30d or 8w, not {text!r}")
    return timedelta(days=int(match[1]) * _UNITS[match[2]])


def _add_prune(parser: CommandParser) -> None:
    add_out(parser)
    parser.add_argument(
        "--keep",
        type=whole_type(at_least=1),
        metavar="N",
        help="keep the N newest runs (default: by age alone)",
    )
    parser.add_argument(
        "--older-than",
        type=_age,
        metavar="AGE",
        help="older than 30d (days) or 8w (weeks); default: by number alone",
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="also runs that later ones are held against (last accepted, best level)",
    )
    parser.add_argument("--dry-run", action="store_true", help="only print (the default)")
    parser.add_argument("--yes", action="store_true", help="remove them")


def _prune_problems(args: argparse.Namespace) -> list[str]:
    problems = []
    if args.keep is None and args.older_than is None and not args.misread:
        problems.append("--keep N, --older-than AGE or both say which runs are old")
    if args.yes and args.dry_run:
        problems.append("--yes removes and --dry-run only prints: give one of them")
    return problems


def _prune(args: argparse.Namespace, console: Console) -> int:
    from datetime import timedelta

    from runbook.tools.prune import find_old, remove_run

    if not args.out.is_dir():
        raise UsageError(f"no folder {args.out}/", hint="--out names another")
    age = args.older_than or timedelta(0)
    found = find_old(args.out, keep=args.keep or 1, older_than=age, everything=args.all)
    gone = [one for one in found if one.goes]
    if args.yes:
        for one in gone:
            remove_run(args.out, one.run_id)
            console.progress(f"removed {one.run_id}")
    if args.json:
        runs = [asdict(one) | {"removed": args.yes and one.goes} for one in found]
        console.json_document({"schema_version": 1, "runs": runs})
        return ProgramExit.GO
    console.table(("RUN", "SIZE", ""), [_row(one, removed=args.yes) for one in found])
    total = _size(sum(one.size_bytes for one in gone))
    if args.yes:
        console.result(f"{len(gone)} of {len(found)} runs removed, {total}")
    else:
        console.result(f"{len(gone)} of {len(found)} runs would go, {total}; --yes removes them")
    return ProgramExit.GO


def _row(one: Candidate, *, removed: bool) -> tuple[str, ...]:
    goes = "removed" if removed else "would go"
    return one.run_id, _size(one.size_bytes), f"stays: {one.kept}" if one.kept else goes


PRUNE = Command(
    name="prune",
    help="remove old runs; without --yes it only prints which",
    description="""\
Print which runs are old, and with --yes remove them. Never removed: the newest run, one
that is still going on, what is not a run's folder, and (without --all) a run that later
ones are held against. With --keep and --older-than a run goes if both say so.""",
    examples="""\
  runbook prune --older-than 30d
  runbook prune --keep 50 --older-than 8w --yes""",
    add_arguments=_add_prune,
    problems=_prune_problems,
    run=_prune,
)
