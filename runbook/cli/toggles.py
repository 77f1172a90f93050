"""`runbook toggles`: every NSA_* variable with its value in force, from the trainer's own table."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from runbook.cli._parser import add_output_flags
from runbook.console import console_for, table
from runbook.errors import UsageError


def add_parser(subparsers: Any) -> None:
    """Add the sub-command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "toggles",
        help="list every NSA_* variable with its value in force",
        description=(
            "List every toggle: value in force in this environment, allowed values, meaning, and\n"
            "the requirement (docs/spec.md) that asks for it. `arm` marks those that may change\n"
            "inside one launch.\n"
            "A variable that is unknown or holds a bad value is an error (exit code 2)."
        ),
        epilog="example:\n  NSA_DDP_BUCKET_MB=50 runbook toggles",
    )
    add_output_flags(parser, json_help="one JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    """Print the table. Raises UsageError that lists everything wrong with the environment."""
    from nsa.contract import NSAError
    from nsa.toggles import TOGGLES, parse_toggles

    console = console_for(args)
    try:
        chosen = parse_toggles(os.environ)
    except NSAError as error:
        raise UsageError(str(error)) from error
    rows = [
        {
            "name": row.name,
            "value": chosen.values[row.name],
            "source": chosen.sources.get(row.name, "default"),
            "default": row.default,
            "allowed": row.allowed(),
            "meaning": row.meaning,
            "requirement": row.requirement,
            "arm": row.arm,
            "reader": row.reader,
        }
        for row in TOGGLES.values()
    ]
    if args.json:
        console.result(json.dumps({"schema_version": 1, "toggles": rows}, indent=2))
        return 0
    header = ("VARIABLE", "IN FORCE", "FROM", "ALLOWED", "ARM", "REQUIREMENT", "MEANING")
    cells = [
        (
            str(row["name"]),
            _shown(row["value"]),
            str(row["source"]),
            str(row["allowed"]),
            "arm" if row["arm"] else "",
            str(row["requirement"]),
            str(row["meaning"]),
        )
        for row in rows
    ]
    console.result(table(header, cells))
    return 0


def _shown(value: object) -> str:
    if value is None:
        return "(config)"
    if isinstance(value, bool):
        return str(int(value))
    return f"{value:g}" if isinstance(value, float) else str(value)
