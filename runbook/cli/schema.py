"""`runbook schema`: the JSON Schema of run.json and of its parts."""

from __future__ import annotations

import argparse
import json
from typing import Any

from runbook.cli._parser import add_output_flags
from runbook.console import console_for

_DOCUMENTS = ("run", "profile")


def add_parser(subparsers: Any) -> None:
    """Add the sub-command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "schema",
        help="print the JSON Schema of run.json, or of a profile",
        description="Print the JSON Schema of a document that this program writes or reads.",
        epilog="examples:\n  runbook schema > run.schema.json\n  runbook schema profile",
    )
    parser.add_argument(
        "document",
        nargs="?",
        choices=_DOCUMENTS,
        default="run",
        help="run: run.json (the default); profile: a profile's YAML",
    )
    add_output_flags(parser, json_help="accepted for symmetry: a schema always is JSON")


def run(args: argparse.Namespace) -> int:
    """Print the schema."""
    from runbook.config import Profile
    from runbook.records import RunRecord

    model = RunRecord if args.document == "run" else Profile
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **model.model_json_schema(mode="serialization"),
    }
    console_for(args).result(json.dumps(schema, indent=2))
    return 0
