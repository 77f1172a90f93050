"""`runbook stacks`: what every rank of a live run is doing."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from runbook.cli._parser import Command, CommandParser, add_out
from runbook.cli.finished import find_run
from runbook.console import Console
from runbook.errors import ProgramExit

if TYPE_CHECKING:
    from runbook.tools.watch import RankStack


def _add_stacks(parser: CommandParser) -> None:
    parser.add_argument(
        "run_folder", metavar="RUN", help="a run directory, a run's folder, or a run's id"
    )
    add_out(parser)


def _stacks(args: argparse.Namespace, console: Console) -> int:
    from runbook.tools.watch import live_stacks

    folders = _folders(args.run_folder, args.out)
    found = [(folder, stack) for folder in folders for stack in live_stacks(folder)]
    if args.json:
        rows = [asdict(stack) | {"run_dir": str(folder)} for folder, stack in found]
        console.json_document({"schema_version": 1, "ranks": rows})
    else:
        for folder, stack in found:
            console.result(*_stack_lines(folder, stack))
    if found:
        answered = all(stack.stack for _, stack in found)
        return ProgramExit.GO if answered else ProgramExit.NO_GO
    why = "its ranks have ended" if folders else "it has no heartbeat files"
    earlier = "; earlier stacks are in its stackdump_rank*.txt" if folders else ""
    console.progress(f"no rank of {args.run_folder} is alive: {why}{earlier}")
    return ProgramExit.INCOMPLETE


def _stack_lines(folder: Path, stack: RankStack) -> Iterator[str]:
    yield (
        f"rank {stack.rank} (pid {stack.pid}, {stack.state}) phase {stack.phase}, step "
        f"{stack.step}, silent for {stack.silent_s:.1f} s; collective "
        f"{stack.last_collective or 'none'}; {folder}"
    )
    for line in stack.stack.rstrip().splitlines() or ["(no stack could be read)"]:
        yield f"  {line}"
    if stack.path:
        yield f"(kept in {stack.path})"


def _folders(text: str, out: Path) -> list[Path]:
    """Directories with heartbeats: the one that is named, or all of a run's launches."""
    path = Path(text)
    root = (path if path.is_dir() else find_run(text, out)).resolve()
    depths = ("", "*/", "*/*/")
    return sorted(
        {
            file.parent.resolve()  # once, with a link `latest` too
            for depth in depths
            for file in root.glob(f"{depth}heartbeat_rank*.jsonl")
        }
    )


STACKS = Command(
    name="stacks",
    help="print the Python stacks of every rank of a live run, even of one that hangs",
    description="""\
Have every live rank below RUN write its stacks and its last collective, and print
them. The run goes on. Works while a rank is stuck in a collective; a frozen rank is
read from outside where py-spy is installed. Only processes that carry the run's
token, or have its heartbeat file open, are touched.""",
    examples=("  runbook stacks artifacts/cpu_smoke/latest\n  runbook stacks 20260131T120000Z"),
    exits="0 every live rank answered, 1 one did not, 2 usage, 3 no rank is alive",
    add_arguments=_add_stacks,
    run=_stacks,
)
