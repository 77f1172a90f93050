"""`runbook stacks`: what every rank of a live run is doing, now."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from runbook.cli._parser import add_output_flags
from runbook.console import console_for, printable

_UNDECIDED = 3


def add_parser(subparsers: Any) -> None:
    """Add the sub-command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "stacks",
        help="the Python stacks of every rank of a live run, now, whatever it hangs in",
        description=(
            "Have every live rank below RUN write its stacks and its last collective, and print\n"
            "them. The run goes on. Works while a rank is stuck in a collective; a frozen rank is\n"
            "read from outside where py-spy is installed. Only processes that carry the run's\n"
            "token, or have its heartbeat file open, are touched."
        ),
        epilog=(
            "examples:\n"
            "  runbook stacks artifacts/cpu_smoke/latest\n"
            "  runbook stacks 20260131T120000Z\n"
            "exit codes: 0 every live rank answered, 1 one did not, 2 usage, 3 no rank is alive"
        ),
    )
    parser.add_argument(
        "run_folder", metavar="RUN", help="a run directory, a run's folder, or a run's id"
    )
    parser.add_argument(
        "--out", metavar="DIR", default="artifacts", help="where run ids are looked up"
    )
    add_output_flags(parser, json_help="one JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    """Ask every live rank and print what it says."""
    from dataclasses import asdict

    from runbook.tools.watch import live_stacks

    console = console_for(args)
    folders = _folders(args.run_folder, Path(args.out))
    found = [(folder, stack) for folder in folders for stack in live_stacks(folder)]
    if args.json:
        rows = [asdict(stack) | {"run_dir": str(folder)} for folder, stack in found]
        console.json_document({"schema_version": 1, "ranks": rows})
    else:
        for folder, stack in found:
            head = (
                f"rank {stack.rank} (pid {stack.pid}, {stack.state}) phase {stack.phase}, step "
                f"{stack.step}, silent for {stack.silent_s:.1f} s; collective "
                f"{stack.last_collective or 'none'}; {folder}"
            )
            console.result(printable(head))
            console.result(printable(stack.stack.rstrip() or "  (no stack could be read)"))
            if stack.path:
                console.result(printable(f"(kept in {stack.path})"))
    if not found:
        why = "its ranks have ended" if folders else "it has no heartbeat files"
        console.progress(
            printable(
                f"no rank of {args.run_folder} is alive: {why}; "
                "stacks of the past are in its stackdump_rank*.txt"
            )
        )
        return _UNDECIDED
    return 0 if all(stack.stack for _, stack in found) else 1


def _folders(text: str, out: Path) -> list[Path]:
    """Directories with heartbeats: the one that is named, or all of a run's launches."""
    from runbook.cli._common import find_run

    path = Path(text)
    if not path.is_dir():
        path = find_run(text, out)
    root = path.resolve()
    files = [*root.glob("heartbeat_rank*.jsonl"), *root.glob("*/*/heartbeat_rank*.jsonl")]
    return sorted({file.parent for file in [*files, *root.glob("*/heartbeat_rank*.jsonl")]})
