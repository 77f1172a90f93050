"""`runbook verify`: is every number of a run what its artifacts give?"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from runbook.cli._common import DEFAULT_OUT, find_run
from runbook.cli._parser import add_output_flags
from runbook.console import console_for, printable


def add_parser(subparsers: Any) -> None:
    """Add the sub-command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "verify",
        help="recompute every number of a run from its artifacts",
        description=(
            "Read and judge a finished run again and compare: digests of all files, run.json with\n"
            "its journal, every check and measurement with the artifacts, every report with a\n"
            "fresh rendering. Changes nothing."
        ),
        epilog=(
            "examples:\n"
            "  runbook verify                              the newest run\n"
            "  runbook verify artifacts/20261121T010203Z-840303b\n"
            "exit codes: 0 nothing differs, 1 something does (each difference is named), 2 usage"
        ),
    )
    parser.add_argument(
        "run_name", nargs="?", metavar="RUN", help="a run's folder or id; the newest if left out"
    )
    parser.add_argument(
        "--out",
        default=DEFAULT_OUT,
        metavar="DIR",
        help=f"where run folders are looked for (default {DEFAULT_OUT})",
    )
    add_output_flags(parser, json_help="one JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    """Print every difference; 0 if there is none."""
    from runbook.engine.verify import verify_run

    console = console_for(args)
    folder = find_run(args.run_name, Path(args.out))
    found = verify_run(folder)
    if args.json:
        document = {"schema_version": 1, "ok": found.ok, **dataclasses.asdict(found)}
        console.result(json.dumps(document, indent=2))
        return 0 if found.ok else 1
    for difference in found.differences:
        console.result(f"DIFFERS  {printable(difference)}")
    checked = (
        f"{found.files} files, {found.checks} checks, {found.measurements} measurements, "
        f"{len(found.reports)} reports"
    )
    if found.ok:
        console.result(f"verified {found.run_id}: {checked}; nothing differs")
        return 0
    console.result(f"NOT VERIFIED {found.run_id}: {len(found.differences)} differences ({checked})")
    return 1
