"""`runbook phases`: what there is to run, in which order, and what feeds what."""

from __future__ import annotations

import argparse
import json
from typing import Any

from runbook.cli._parser import add_output_flags
from runbook.console import console_for, table


def add_parser(subparsers: Any) -> None:
    """Add the sub-command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "phases",
        help="list the phases, their question, and what they use of each other",
        description="List the phases in running order. `runbook run --phase NAME,NAME` runs some.",
        epilog="example:\n  runbook phases --json",
    )
    add_output_flags(parser, json_help="one JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    """Print the phases."""
    from runbook import registry

    console = console_for(args)
    if args.json:
        rows = [
            {
                "name": phase.name,
                "title": phase.title,
                "question": phase.question,
                "source": phase.source,
                "reads": list(phase.reads),
                "optional": phase.optional,
            }
            for phase in registry.phases().values()
        ]
        console.result(json.dumps({"schema_version": 1, "phases": rows}, indent=2))
        return 0
    rows_text = [
        (
            phase.name + (" (optional)" if phase.optional else ""),
            phase.question,
            ", ".join(phase.reads) or "-",
        )
        for phase in registry.phases().values()
    ]
    console.result(table(("PHASE", "QUESTION", "USES"), rows_text))
    console.progress("an optional phase runs only when named: runbook run --phase all,NAME")
    return 0
