"""`runbook watch`: the watchdog beside any run."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runbook.cli._parser import add_output_flags
from runbook.console import console_for, printable

if TYPE_CHECKING:
    from runbook.launch.anomaly import Anomaly


def add_parser(subparsers: Any) -> None:
    """Add the sub-command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "watch",
        help="stand beside a run and halt it when its numbers or its silence say so",
        description=(
            "Watch a run directory, whoever started the run: heartbeat stall, throughput flat\n"
            "line, gate collapse, zero or exploding gradients, NaN, loss spike, memory growth.\n"
            "What is found goes into DIR/anomalies.jsonl and DIR/.anomaly_type; with --halt also\n"
            "into DIR/.HALT, which stops all ranks after the same step. Ends with the run.\n"
            "Limits come from NSA_WATCH_* (see `runbook toggles`)."
        ),
        epilog=(
            "examples:\n"
            "  runbook watch artifacts/m7c_125m_2xa100_prod/latest --halt 1 --interval 30\n"
            "  runbook watch artifacts/cpu_smoke/latest --once --json\n"
            "exit codes: 0 nothing found, 1 something found, 2 usage, 130 Ctrl-C"
        ),
    )
    parser.add_argument("directory", metavar="DIR", help="the run's directory")
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
        type=_seconds,
        help="seconds between looks (NSA_WATCH_INTERVAL_S)",
    )
    parser.add_argument("--once", action="store_true", help="look once and stop")
    add_output_flags(parser, json_help="one JSON document per anomaly on stdout")


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return value


def run(args: argparse.Namespace) -> int:
    """Watch until the run is over."""
    from dataclasses import asdict, replace

    from runbook.errors import UsageError
    from runbook.launch.anomaly import Thresholds
    from runbook.tools.watch import Watcher, is_run_directory

    console = console_for(args)
    folder = Path(args.directory)
    if not folder.is_dir():
        raise UsageError(
            f"no such directory: {folder}", hint="start the run first; it makes its own"
        )
    above = (folder / "latest").is_dir()
    if not is_run_directory(folder) and (args.once or above):
        hint = f"{folder}/latest is" if above else "one has training.csv or heartbeat_rank*.jsonl"
        raise UsageError(f"{folder} is no run directory", hint=hint)
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
