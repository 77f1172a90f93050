"""`runbook inspect`: what a run directory really holds, ours or anybody's."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from runbook.cli._parser import add_output_flags
from runbook.console import console_for, printable


def add_parser(subparsers: Any) -> None:
    """Add the sub-command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "inspect",
        help="judge any run directory, read-only: what it holds and what is suspicious",
        description=(
            "Judge a run directory without changing it: which runs its training.csv holds, which\n"
            "window its numbers come from, and everything suspicious. Takes this trainer's form\n"
            "and the older one: no header, step,loss,lr,toks_per_s, a row every k steps."
        ),
        epilog=(
            "examples:\n"
            "  runbook inspect artifacts/m7c_125m_2xa100_prod\n"
            "  runbook inspect old/training.csv --loss-floor 5.545\n"
            "exit codes: 0 nothing suspicious, 1 suspicious, 2 usage, 3 too little to say"
        ),
    )
    parser.add_argument("directory", metavar="DIR", help="a run's directory, or one CSV file")
    parser.add_argument(
        "--loss-floor",
        metavar="NATS",
        type=_floor,
        default=None,
        help="loss that nothing can go below, or `none` (default: env.json's, else ln 256)",
    )
    add_output_flags(parser, json_help="one JSON document on stdout")


def _floor(text: str) -> float:
    if text == "none":
        return float("-inf")
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of nats >= 0 nor `none`")
    return value


def run(args: argparse.Namespace) -> int:
    """Print what was found; the exit code says whether it can be believed."""
    from runbook.tools.inspect import inspect_path, inspection_text

    console = console_for(args)
    inspection = inspect_path(Path(args.directory), loss_floor=args.loss_floor)
    if args.json:
        console.result(json.dumps(inspection.document(), indent=2, allow_nan=False))
    else:
        console.result(printable(inspection_text(inspection)))
    return inspection.exit_code
