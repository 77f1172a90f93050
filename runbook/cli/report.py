"""`runbook report`: render a run again, from its run.json alone."""

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
        "report",
        help="render a run's report again",
        description=(
            "Render a run again from its run.json. One format goes to stdout; several are written\n"
            "into the run's folder, and their paths go to stdout."
        ),
        epilog=(
            "examples:\n"
            "  runbook report                                the newest run, on the terminal\n"
            "  runbook report --format md > report.md\n"
            "  runbook report 20261121T010203Z-840303b --format md,html,junit"
        ),
    )
    parser.add_argument(
        "run_name", nargs="?", metavar="RUN", help="a run's folder or id; the newest if left out"
    )
    parser.add_argument(
        "--format",
        default="",
        metavar="LIST",
        help=f"md, json, html, junit, terminal, with commas between (default {_DEFAULT_FORMAT})",
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

    return [f"--format {text}" for text in format_problems(_formats(args))]


def run(args: argparse.Namespace) -> int:
    """Print one format, or write several. The exit code says nothing of the verdict."""
    from runbook.engine.rendering import render, write_reports
    from runbook.records.report import Screen

    console = console_for(args)
    folder = find_run(args.run_name, Path(args.out))
    record = load_run(folder)
    formats = _formats(args)
    if len(formats) > 1:
        for path in write_reports(record, folder, formats):
            console.result(str(path))
        return 0
    text = render(record, formats[0], Screen(color=console.color_out, location=str(folder)))
    console.result(text.rstrip("\n"))
    return 0


def _formats(args: argparse.Namespace) -> list[str]:
    chosen = args.format or ("json" if args.json else _DEFAULT_FORMAT)
    return list(dict.fromkeys(name.strip() for name in chosen.split(",") if name.strip()))
