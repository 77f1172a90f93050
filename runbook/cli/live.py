"""Commands beside a run that is going on: `watch` and `stacks`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING

from runbook.cli._parser import Command, CommandParser, add_out, number_type, path_type
from runbook.cli.finished import find_run
from runbook.console import Console, printable
from runbook.defaults import DEFAULT_OUT
from runbook.errors import ProgramExit, UsageError

if TYPE_CHECKING:
    from runbook.launch.watch.detectors import Anomaly
    from runbook.tools.screen import Screen
    from runbook.tools.watch import RankStack


_LOOK_EVERY_S = 1.0
_REDRAW_S = 2.0
_SAY_EVERY_S = 30.0


def _add_watch(parser: CommandParser) -> None:
    parser.add_argument("directory", type=path_type, metavar="DIR", help="the run's directory")
    parser.add_argument(
        "--halt",
        nargs="?",
        const="1",
        choices=("0", "1"),
        help="write .HALT on an anomaly (--halt 0: only read; default: NSA_WATCH_HALT, else 0)",
    )
    parser.add_argument(
        "--interval",
        metavar="S",
        type=number_type(above=0),
        help="seconds between readings (default: NSA_WATCH_INTERVAL_S, else 30)",
    )
    parser.add_argument("--once", action="store_true", help="read once and stop")


def _watch(args: argparse.Namespace, console: Console) -> int:
    from runbook.launch.watch.watchdog import Budgets, Thresholds
    from runbook.tools.screen import Screen
    from runbook.tools.watch import Watcher

    folder = args.directory
    _refuse_what_no_run_writes_to(folder, once=args.once)
    limits = Thresholds.from_variables(os.environ)
    # Whoever looks on changes nothing, unless it is asked for here or in the environment.
    told = "NSA_WATCH_HALT" in os.environ and limits.halt
    limits = replace(limits, halt=told if args.halt is None else args.halt == "1")
    interval_s = args.interval or limits.interval_s
    within_s = Budgets().silence_s
    if args.once:
        folder = newest_in(folder)
    else:
        folder = begun_in(folder, interval_s=interval_s, within_s=within_s, tell=console.progress)

    def tell(anomaly: Anomaly) -> None:
        screen.found.append(anomaly)
        if args.json:
            console.json_line(asdict(anomaly))
        else:
            console.result(anomaly.line())

    def warn(text: str) -> None:
        console.error(f"warning: {text}")

    watcher = Watcher(folder.resolve(), limits)
    screen = Screen(watcher=watcher)
    if args.once:
        found = watcher.look()
        screen.found += found
        for line in [] if args.json else screen.lines():
            console.result(line)
        for anomaly in found:
            tell(anomaly)
        for line in watcher.blind_spots():
            warn(line)
        rows = watcher.monitor.readings.rows_read
        console.progress(f"read {folder} once; {len(found)} anomalies, {rows} rows read")
        return _code(len(found))
    effect = "will halt the run" if limits.halt else "will only be reported (--halt halts it)"
    console.progress(f"watching {folder}; an anomaly {effect}")
    show = _shower(console, screen)
    if console.is_live:
        interval_s = min(interval_s, _REDRAW_S)
    count = watcher.run(interval_s=interval_s, tell=tell, warn=warn, show=show)
    if console.is_live:
        console.progress("")
    rows = watcher.monitor.readings.rows_read
    console.progress(f"the run is over; {count} anomalies, {rows} rows read")
    return _code(count)


def _shower(console: Console, screen: Screen) -> Callable[[], None]:
    """The screen redrawn on a terminal; in a pipe one line at most every half minute."""
    said_at = -_SAY_EVERY_S

    def show() -> None:
        nonlocal said_at
        if console.is_live:
            console.draw([printable(line)[: console.columns - 1] for line in screen.lines()])
        elif monotonic() - said_at >= _SAY_EVERY_S or screen.watcher.over:
            said_at = monotonic()
            console.progress(screen.status())

    return show


def _code(anomalies: int) -> int:
    return ProgramExit.NO_GO if anomalies else ProgramExit.GO


def _refuse_what_no_run_writes_to(folder: Path, *, once: bool) -> None:
    """A folder that is not there yet, or still empty, is waited for; only --once cannot wait."""
    from nsa.contract import LATEST_LINK, TRAINING_CSV
    from runbook.tools.watch import is_run_directory

    below = Path(DEFAULT_OUT) / folder
    if not folder.is_dir() and (once or below.is_dir()):
        hint = f"{below} is one" if below.is_dir() else "start the run first; it creates its own"
        raise UsageError(f"no such directory: {folder}", hint=hint)
    if is_run_directory(newest_in(folder)):
        return
    newest = None if (folder / LATEST_LINK).is_symlink() else _newest_below(folder)
    if newest is not None:
        raise UsageError(f"{folder} is not a run directory", hint=f"{newest} is")
    if once:
        hint = f"one has {TRAINING_CSV} or heartbeat_rank*.jsonl"
        raise UsageError(f"nothing to read: {folder} is not a run directory", hint=hint)


def _newest_below(folder: Path) -> Path | None:
    """The run directory below that was written last."""
    depths = ("*", "*/*", "*/*/*")
    beats = [path for depth in depths for path in folder.glob(f"{depth}/heartbeat_rank*.jsonl")]
    return max(beats, key=lambda path: path.stat().st_mtime).parent if beats else None


def newest_in(folder: Path) -> Path:
    """The run directory that is meant: the folder, or the one that its link `latest` names."""
    from nsa.contract import LATEST_LINK
    from runbook.tools.watch import is_run_directory

    link = folder / LATEST_LINK
    return link if link.is_dir() and not is_run_directory(folder) else folder


def begun_in(
    folder: Path, *, interval_s: float, within_s: float, tell: Callable[[str], None]
) -> Path:
    """The run directory, as `newest_in`, once a run has begun there.

    A folder whose newest run was over before is waited for, as one that is not there yet or still
    empty: as long as a launch may be silent. Raises UsageError if no run has begun by then.
    """
    from runbook.tools.watch import is_over, is_run_directory

    first = newest_in(folder)
    before = first.resolve() if first != folder and is_over(first) else None
    deadline, place = monotonic() + within_s, first
    if before or not is_run_directory(place):
        why = f"{place} is over" if before else _lacks(folder)
        tell(f"waiting for a run to begin in {folder}, {within_s:g} s at most: {why}")
    while place.resolve() == before or not is_run_directory(place):
        if monotonic() > deadline:
            raise UsageError(
                f"no run has begun in {folder} within {within_s:g} s",
                hint="start the run, then watch its own directory",
            )
        sleep(min(interval_s, _LOOK_EVERY_S))
        place = newest_in(folder)
    return place


def _lacks(folder: Path) -> str:
    from nsa.contract import LATEST_LINK, TRAINING_CSV

    if not folder.is_dir():
        return "it is not there yet"
    return f"no {TRAINING_CSV}, no heartbeat_rank*.jsonl and no link {LATEST_LINK} there yet"


WATCH = Command(
    name="watch",
    help="look on at a run that lives or is over; with --halt, stop it if it goes bad",
    description="""\
The operator's screen of a run directory, whoever started the run and whether or not it
still goes on: its state and the time left, loss, rate, each rank with its memory, the
age of the last checkpoint, incidents, and what cannot be seen; in a pipe one line every
30 s. Meanwhile it looks for a stalled heartbeat, throughput readings that no longer
change, gate collapse, zero or exploding gradients, NaN, loss spikes and memory growth;
without training.csv, by the heartbeats of rank 0. Without --halt it only reads. With
it, anomalies go into DIR/anomalies.jsonl and DIR/.anomaly_type, a stalled rank is asked
for its stack, and DIR/.HALT stops all ranks after the same step. A folder that is not
there yet or still empty is waited for, five minutes at most. One with a link `latest`
means the run that it names, or the next one if that is over; the folder of a whole run
is refused, and its newest launch named. Ends with the run. Limits come from NSA_WATCH_*
(see `runbook toggles`).""",
    examples="""\
  runbook watch artifacts/latest
  runbook watch artifacts/m7c_125m_2xa100_prod --halt 1 --interval 30
  runbook watch artifacts/cpu_smoke/latest --once""",
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
