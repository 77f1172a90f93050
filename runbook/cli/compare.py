"""`runbook compare A B`: two finished runs, comparable or not, and what changed."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from runbook.cli._common import DEFAULT_OUT, find_run, load_run
from runbook.cli._parser import add_output_flags
from runbook.console import console_for, printable


def add_parser(subparsers: Any) -> None:
    """Add the sub-command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "compare",
        help="compare two finished runs: comparable or not, checks and speed that changed",
        description=(
            "Compare run B with the reference A. Numbers are compared only if the work is the\n"
            "same and one thing differs: code, software, machine or toggles."
        ),
        epilog=(
            "example:\n"
            "  runbook compare 20261120T010203Z-840303b 20261121T010203Z-aa84eda\n"
            "exit codes: 0 nothing worse, 1 worse, 2 usage, 3 not comparable or undecided"
        ),
    )
    parser.add_argument("a", metavar="A", help="the reference: a run's folder or id")
    parser.add_argument("b", metavar="B", help="the run to judge")
    parser.add_argument(
        "--out",
        default=DEFAULT_OUT,
        metavar="DIR",
        help=f"where run folders are looked for (default {DEFAULT_OUT})",
    )
    add_output_flags(parser, json_help="one JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    """Print the comparison; the exit code says whether B is worse."""
    from runbook.tools.compare import compare_runs, comparison_text

    console = console_for(args)
    folders = [find_run(name, Path(args.out)) for name in (args.a, args.b)]
    records = [load_run(folder) for folder in folders]
    found = compare_runs(records[0], folders[0], records[1], folders[1])
    if args.json:
        console.result(json.dumps(found.document(), indent=2, allow_nan=False))
    else:
        console.result(printable(comparison_text(found)))
    return found.exit_code
