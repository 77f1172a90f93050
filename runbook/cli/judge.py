"""`runbook judge`: a finished run under another profile's limits, without launching anything."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from runbook.cli._common import DEFAULT_OUT, find_run, load_run
from runbook.cli._parser import add_output_flags
from runbook.console import console_for

_DEFAULT_FORMAT = "terminal"


def add_parser(subparsers: Any) -> None:
    """Add the sub-command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "judge",
        help="judge a finished run again under other limits",
        description=(
            "Judge the artifacts of a finished run by the limits of another profile. Starts\n"
            "nothing and changes nothing; the report goes to stdout."
        ),
        epilog=(
            "examples:\n"
            "  runbook judge --profile a100x2_pcie3\n"
            "  runbook judge 20261121T010203Z-840303b --profile mine.yaml --format md\n"
            "exit codes: 0 GO, 1 NO-GO, 2 usage, 3 INCOMPLETE"
        ),
    )
    parser.add_argument(
        "run_name", nargs="?", metavar="RUN", help="a run's folder or id; the newest if left out"
    )
    parser.add_argument(
        "--profile", default="", metavar="NAME|FILE", help="whose limits (default: the run's own)"
    )
    parser.add_argument(
        "--format",
        default="",
        metavar="FORMAT",
        help=f"md, json, html, junit or terminal (default {_DEFAULT_FORMAT})",
    )
    parser.add_argument(
        "--out",
        default=DEFAULT_OUT,
        metavar="DIR",
        help=f"where run folders are looked for (default {DEFAULT_OUT})",
    )
    add_output_flags(parser, json_help="the same as --format json")


def problems(args: argparse.Namespace) -> list[str]:
    """What is wrong with the arguments."""
    from runbook.engine.rendering import format_problems

    return [f"--format {text}" for text in format_problems([_format(args)])]


def run(args: argparse.Namespace) -> int:
    """Print the new report; the exit code is that of the new verdict."""
    from runbook.config import load_profile, load_profile_document
    from runbook.engine.rejudge import judge_again
    from runbook.engine.rendering import render
    from runbook.records.report import Screen

    console = console_for(args)
    folder = find_run(args.run_name, Path(args.out))
    record = load_run(folder)
    if args.profile:
        profile = load_profile(args.profile)
    else:
        profile = load_profile_document(record.profile_document, where="run.json")
    judged = judge_again(record, folder, profile, named=args.profile)
    text = render(judged, _format(args), Screen(color=console.color_out))
    console.result(text.rstrip("\n"))
    return judged.verdict.exit_code


def _format(args: argparse.Namespace) -> str:
    return str(args.format) or ("json" if args.json else _DEFAULT_FORMAT)
