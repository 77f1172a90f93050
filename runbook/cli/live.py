"""Commands beside a run that is going on: `watch` and `stacks`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from runbook.cli._common import find_run
from runbook.cli._parser import Command, CommandParser, add_out, number_type
from runbook.console import Console, printable
from runbook.errors import UsageError

if TYPE_CHECKING:
    from runbook.launch.anomaly import Anomaly
    from runbook.tools.watch import RankStack


def _add_watch(parser: CommandParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR", help="the run's directory")
    parser.add_argument(
        "--halt",
        nargs="?",
        const="1",
        choices=("0", "1"),
        help="write .HALT on an anomaly (--halt 0: never); default NSA_WATCH_HALT",
    )
    parser.add_argument(
        "--interval",
        metavar="S",
        type=number_type(above=0),
        help="seconds between looks (NSA_WATCH_INTERVAL_S)",
    )
    parser.add_argument("--once", action="store_true", help="look once and stop")


def _watch(args: argparse.Namespace, console: Console) -> int:
    """Watch until the run is over."""
    from runbook.launch.anomaly import Thresholds
    from runbook.tools.watch import Watcher

    folder = args.directory
    _refuse_what_no_run_writes_to(folder, once=args.once)
    limits = Thresholds.from_variables(os.environ)
    if args.halt is not None:
        limits = replace(limits, halt=args.halt == "1")

    def tell(anomaly: Anomaly) -> None:
        if args.json:
            console.json_line(asdict(anomaly))
        else:
            console.result(printable(anomaly.line()))

    watcher = Watcher(folder.resolve(), limits)
    if args.once:
        found = watcher.look()
        for anomaly in found:
            tell(anomaly)
        return 1 if found else 0
    halting = "will be halted" if limits.halt else "is only told"
    console.progress(f"watching {folder}; on an anomaly the run {halting}")
    count = watcher.run(interval_s=args.interval or limits.interval_s, tell=tell)
    console.progress(f"the run is over; {count} anomalies, {watcher.monitor.rows_read} rows read")
    return 1 if count else 0


def _refuse_what_no_run_writes_to(folder: Path, *, once: bool) -> None:
    from runbook.tools.watch import is_run_directory

    if not folder.is_dir():
        raise UsageError(
            f"no such directory: {folder}", hint="start the run first; it makes its own"
        )
    above = (folder / "latest").is_dir()
    # A folder that is still empty may be one whose run is about to write; only --once cannot wait.
    if not is_run_directory(folder) and (once or above):
        hint = f"{folder}/latest is" if above else "one has training.csv or heartbeat_rank*.jsonl"
        raise UsageError(f"{folder} is no run directory", hint=hint)


WATCH = Command(
    name="watch",
    help="stand beside a run and halt it when its numbers or its silence say so",
    description=(
        "Watch a run directory, whoever started the run: heartbeat stall, throughput flat\n"
        "line, gate collapse, zero or exploding gradients, NaN, loss spike, memory growth.\n"
        "What is found goes into DIR/anomalies.jsonl and DIR/.anomaly_type; with --halt also\n"
        "into DIR/.HALT, which stops all ranks after the same step. Ends with the run.\n"
        "Limits come from NSA_WATCH_* (see `runbook toggles`)."
    ),
    examples=(
        "  runbook watch artifacts/m7c_125m_2xa100_prod/latest --halt 1 --interval 30\n"
        "  runbook watch artifacts/cpu_smoke/latest --once --json"
    ),
    exits="0 nothing found, 1 something found, 2 usage, 130 Ctrl-C",
    json_help="one JSON document per anomaly on stdout",
    add_arguments=_add_watch,
    run=_watch,
)


def _add_stacks(parser: CommandParser) -> None:
    parser.add_argument(
        "run_folder", metavar="RUN", help="a run directory, a run's folder, or a run's id"
    )
    add_out(parser)


def _stacks(args: argparse.Namespace, console: Console) -> int:
    """Ask every live rank and print what it says."""
    from runbook.tools.watch import live_stacks

    folders = _folders(args.run_folder, args.out)
    found = [(folder, stack) for folder in folders for stack in live_stacks(folder)]
    if args.json:
        rows = [asdict(stack) | {"run_dir": str(folder)} for folder, stack in found]
        console.json_document({"schema_version": 1, "ranks": rows})
    else:
        for folder, stack in found:
            for line in _stack_lines(folder, stack):
                console.result(printable(line))
    if found:
        return 0 if all(stack.stack for _, stack in found) else 1
    why = "its ranks have ended" if folders else "it has no heartbeat files"
    text = f"no rank of {args.run_folder} is alive: {why}"
    console.progress(printable(f"{text}; stacks of the past are in its stackdump_rank*.txt"))
    return 3


def _stack_lines(folder: Path, stack: RankStack) -> Iterator[str]:
    yield (
        f"rank {stack.rank} (pid {stack.pid}, {stack.state}) phase {stack.phase}, step "
        f"{stack.step}, silent for {stack.silent_s:.1f} s; collective "
        f"{stack.last_collective or 'none'}; {folder}"
    )
    yield stack.stack.rstrip() or "  (no stack could be read)"
    if stack.path:
        yield f"(kept in {stack.path})"


def _folders(text: str, out: Path) -> list[Path]:
    """Directories with heartbeats: the one that is named, or all of a run's launches."""
    path = Path(text)
    root = (path if path.is_dir() else find_run(text, out)).resolve()
    depths = ("", "*/", "*/*/")
    return sorted(
        {file.parent for depth in depths for file in root.glob(f"{depth}heartbeat_rank*.jsonl")}
    )


STACKS = Command(
    name="stacks",
    help="the Python stacks of every rank of a live run, now, whatever it hangs in",
    description=(
        "Have every live rank below RUN write its stacks and its last collective, and print\n"
        "them. The run goes on. Works while a rank is stuck in a collective; a frozen rank is\n"
        "read from outside where py-spy is installed. Only processes that carry the run's\n"
        "token, or have its heartbeat file open, are touched."
    ),
    examples=("  runbook stacks artifacts/cpu_smoke/latest\n  runbook stacks 20260131T120000Z"),
    exits="0 every live rank answered, 1 one did not, 2 usage, 3 no rank is alive",
    add_arguments=_add_stacks,
    run=_stacks,
)
