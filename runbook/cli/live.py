"""Commands beside a run that is going on: `watch` and `stacks`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING

from nsa.contract import LATEST_LINK, TRAINING_CSV
from runbook.cli._parser import Command, CommandParser, add_out, number_type
from runbook.cli.finished import find_run
from runbook.console import Console, in_one_line, printable
from runbook.errors import ProgramExit, UsageError

if TYPE_CHECKING:
    from runbook.launch.detectors import Anomaly
    from runbook.tools.watch import RankStack


_LOOK_EVERY_S = 1.0


def _add_watch(parser: CommandParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR", help="the run's directory")
    parser.add_argument(
        "--halt",
        nargs="?",
        const="1",
        choices=("0", "1"),
        help="write .HALT on an anomaly (--halt 0: never; default: NSA_WATCH_HALT, else 1)",
    )
    parser.add_argument(
        "--interval",
        metavar="S",
        type=number_type(above=0),
        help="seconds between readings (default: NSA_WATCH_INTERVAL_S, else 30)",
    )
    parser.add_argument("--once", action="store_true", help="read once and stop")


def _watch(args: argparse.Namespace, console: Console) -> int:
    from runbook.launch.watchdog import Budgets, Thresholds
    from runbook.tools.watch import Watcher, is_run_directory

    folder = args.directory
    _refuse_what_no_run_writes_to(folder, once=args.once)
    limits = Thresholds.from_variables(os.environ)
    if args.halt is not None:
        limits = replace(limits, halt=args.halt == "1")
    interval_s = args.interval or limits.interval_s
    within_s = Budgets().silence_s
    if not is_run_directory(folder):
        console.progress(
            f"waiting for a run to begin in {folder}, {within_s:g} s at most: "
            f"no {TRAINING_CSV}, no heartbeat_rank*.jsonl and no link {LATEST_LINK} there yet"
        )
    folder = begun_in(folder, interval_s=interval_s, within_s=within_s)

    def tell(anomaly: Anomaly) -> None:
        if args.json:
            console.json_line(asdict(anomaly))
        else:
            console.result(in_one_line(anomaly.line()))

    def warn(text: str) -> None:
        console.error(in_one_line(f"warning: {text}"))

    watcher = Watcher(folder.resolve(), limits)
    if args.once:
        found = watcher.look()
        for anomaly in found:
            tell(anomaly)
        for line in watcher.blind_spots():
            warn(line)
        rows = watcher.monitor.readings.rows_read
        console.progress(f"read {folder} once; {len(found)} anomalies, {rows} rows read")
        return _code(len(found))
    effect = "will halt the run" if limits.halt else "will only be reported"
    console.progress(f"watching {folder}; an anomaly {effect}")
    count = watcher.run(interval_s=interval_s, tell=tell, warn=warn)
    rows = watcher.monitor.readings.rows_read
    console.progress(f"the run is over; {count} anomalies, {rows} rows read")
    return _code(count)


def _code(anomalies: int) -> int:
    return ProgramExit.NO_GO if anomalies else ProgramExit.GO


def _refuse_what_no_run_writes_to(folder: Path, *, once: bool) -> None:
    from runbook.tools.watch import is_run_directory

    if not folder.is_dir():
        raise UsageError(
            f"no such directory: {folder}", hint="start the run first; it creates its own"
        )
    if is_run_directory(folder):
        return
    newest = _newest_below(folder)
    # A folder that is still empty may be one whose run is about to write; only --once cannot wait.
    if newest is not None:
        raise UsageError(f"{folder} is not a run directory", hint=f"{newest} is")
    if once:
        hint = f"one has {TRAINING_CSV} or heartbeat_rank*.jsonl"
        raise UsageError(f"nothing to read: {folder} is not a run directory", hint=hint)


def _newest_below(folder: Path) -> Path | None:
    """The run directory below that was written last: of its link `latest`, else of a run."""
    if (folder / LATEST_LINK).is_dir():
        return folder / LATEST_LINK
    depths = ("*", "*/*", "*/*/*")
    beats = [path for depth in depths for path in folder.glob(f"{depth}/heartbeat_rank*.jsonl")]
    return max(beats, key=lambda path: path.stat().st_mtime).parent if beats else None


def begun_in(folder: Path, *, interval_s: float, within_s: float) -> Path:
    """The run directory: the folder, or the run that its link `latest` names once it appears.

    A folder that is still empty is waited for as long as a launch may be silent. Raises UsageError
    if nothing has begun to write there by then.
    """
    from runbook.tools.watch import is_run_directory

    place, deadline = folder, monotonic() + within_s
    while not is_run_directory(place):
        if monotonic() > deadline:
            raise UsageError(
                f"no run has begun in {folder} within {within_s:g} s",
                hint="start the run, then watch its own directory",
            )
        sleep(min(interval_s, _LOOK_EVERY_S))
        if (folder / LATEST_LINK).is_dir():
            place = folder / LATEST_LINK
    return place


WATCH = Command(
    name="watch",
    help="watch a live run, and halt it if its numbers go bad or a rank falls silent",
    description="""\
Watch a run directory, whoever started the run, for a stalled heartbeat, throughput
readings that no longer change, gate collapse, zero or exploding gradients, NaN, loss
spikes and memory growth; without training.csv, by the heartbeats of rank 0. What
cannot be watched is said on stderr. A folder that is still empty is waited for, five
minutes at most, and so is its link `latest`; the folder of a whole run is refused, and
its newest launch named. Anomalies go into DIR/anomalies.jsonl and
DIR/.anomaly_type; with --halt also into DIR/.HALT, which stops all ranks after the
same step. Ends with the run. Limits come from NSA_WATCH_* (see `runbook toggles`).""",
    examples="""\
  runbook watch artifacts/m7c_125m_2xa100_prod/latest --halt 1 --interval 30
  runbook watch artifacts/cpu_smoke/latest --once --json""",
    exits="0 no anomaly, 1 at least one, 2 usage, 130 Ctrl-C",
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
        answered = all(stack.stack for _, stack in found)
        return ProgramExit.GO if answered else ProgramExit.NO_GO
    why = "its ranks have ended" if folders else "it has no heartbeat files"
    text = f"no rank of {args.run_folder} is alive: {why}"
    console.progress(printable(f"{text}; earlier stacks are in its stackdump_rank*.txt"))
    return ProgramExit.INCOMPLETE


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
