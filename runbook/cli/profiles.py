"""`runbook profiles`: which machines are known, and each number of one profile with its source."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from runbook.cli._parser import add_output_flags
from runbook.console import Console, console_for, table

if TYPE_CHECKING:
    from runbook.config import Profile


def add_parser(subparsers: Any) -> None:
    """Add the sub-command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "profiles",
        help="list the profiles; show one with every number's source",
        description="List the hardware profiles, or show one: machine, limits and their sources.",
        epilog=(
            "examples:\n"
            "  runbook profiles\n"
            "  runbook profiles a100x2_pcie4\n"
            "  runbook profiles ./mine.yaml --json"
        ),
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="a profile's name, or a .yaml file")
    parser.add_argument(
        "--page", action="store_true", help="print the page of thresholds, docs/thresholds.md"
    )
    add_output_flags(parser, json_help="one JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    """Print the list, or one profile."""
    from runbook.config import detect_profile, load_profile, profile_names

    console = console_for(args)
    if args.page:
        from runbook.config.page import thresholds_page

        console.result(thresholds_page().rstrip("\n"))
        return 0
    if args.name is not None:
        profile = load_profile(args.name)
        if args.json:
            console.result(json.dumps(profile.model_dump(mode="json"), indent=2))
        else:
            _show(console, profile)
        return 0
    profiles = [load_profile(name) for name in profile_names()]
    chosen, reason = detect_profile()
    if args.json:
        rows = [
            {"name": item.name, "title": item.title, "scope": item.scope, "ranks": item.ranks}
            for item in profiles
        ]
        document = {"schema_version": 1, "auto": {"name": chosen, "reason": reason}}
        console.result(json.dumps({**document, "profiles": rows}, indent=2))
        return 0
    listing = [
        (
            item.name + (" *" if item.name == chosen else ""),
            str(item.ranks),
            "yes" if item.throughput_gated else "no",
            item.title,
        )
        for item in profiles
    ]
    console.result(table(("PROFILE", "RANKS", "THROUGHPUT GATED", "MACHINE"), listing))
    console.result(f"* what --profile auto takes here: {reason}")
    return 0


def _show(console: Console, profile: Profile) -> None:
    from runbook.config.page import limits_of

    console.result(f"{profile.name}: {profile.title}")
    console.result(f"scope    {profile.scope}")
    console.result(f"config   {profile.config} (one GPU: {profile.config_single})")
    console.result(f"branch   {profile.branch or 'any'}")
    console.result(f"ranks    {profile.ranks}")
    console.result("")
    limits = [
        (limit.spec.name, str(limit), "" if limit.gated else "shown only", limit.source)
        for limit in limits_of(profile)
    ]
    console.result(table(("LIMIT", "VALUE", "", "SOURCE"), limits))
    if profile.env:
        console.result("")
        rows = [(name, item.value, item.source) for name, item in sorted(profile.env.items())]
        console.result(table(("VARIABLE", "VALUE", "SOURCE"), rows))
    console.result("")
    required = [(name,) for name in profile.required]
    console.result(table((f"REQUIRED FOR A GO ({len(required)} checks)",), required))
