"""`runbook watch`: look on at a run that somebody else started."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING

from runbook.cli._parser import Command, CommandParser, number_type, path_type
from runbook.cli.finished import folder_of
from runbook.console import Console
from runbook.defaults import DEFAULT_OUT
from runbook.errors import ProgramExit, UsageError

if TYPE_CHECKING:
    from runbook.launch.watch.detectors import Anomaly
    from runbook.launch.watch.watchdog import Thresholds
    from runbook.tools.screen import Screen


_LOOK_EVERY_S = 1.0
_REDRAW_S = 2.0
_SAY_EVERY_S = 30.0


def _add_watch(parser: CommandParser) -> None:
    parser.add_argument(
        "directory",
        nargs="?",
        type=path_type,
        metavar="DIR",
        help=f"the run's directory, or a run's id (default: {DEFAULT_OUT}/latest)",
    )
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
    from nsa.contract import LATEST_LINK
    from runbook.launch.watch.watchdog import Budgets, Thresholds

    named = args.directory or Path(DEFAULT_OUT) / LATEST_LINK
    folder = _launch_in(folder_of(named), once=args.once)
    limits = Thresholds.from_variables(os.environ)
    # Whoever looks on changes nothing, unless it is asked for here or in the environment.
    told = "NSA_WATCH_HALT" in os.environ and limits.halt
    limits = replace(limits, halt=told if args.halt is None else args.halt == "1")
    interval_s = args.interval or limits.interval_s
    view = _View(console, limits, as_json=args.json)
    if args.once:
        view.read_once(newest_in(folder))
        return view.code
    within_s = Budgets().silence_s
    folder = begun_in(folder, interval_s=interval_s, within_s=within_s, tell=console.progress)
    return _look_on(folder, view, min(interval_s, _REDRAW_S) if console.is_live else interval_s)


def _look_on(folder: Path, view: _View, interval_s: float) -> int:
    """Look on at a launch; behind the link `latest` at those that come after it in its run, too."""
    from runbook.tools.follow import following, launch_name, not_watched

    say = view.console.progress
    effect = "the run is stopped at an anomaly"
    if not view.limits.halt:
        effect = "anomalies are only reported; --halt stops the run at one"
    place: Path | None = folder.resolve()
    named = f"{folder}: {launch_name(folder.resolve())}" if folder.is_symlink() else str(folder)
    say(f"watching {named}; {effect}")
    followed = following(folder)
    while place is not None:
        if what := not_watched(place):
            say(f"{launch_name(place)}: {what}, nothing to watch")
        else:
            view.watch(place, interval_s, partial(followed.has_left, place) if followed else None)
        place = followed.next(place) if followed else None
        if place is not None:
            say(f"now {launch_name(place)}")
    say(f"the run is over; {view.seen}")
    return view.code


class _View:
    """What is told of the run directories that are looked at."""

    def __init__(self, console: Console, limits: Thresholds, *, as_json: bool) -> None:
        self.console, self.limits, self._as_json = console, limits, as_json
        self.count, self.rows = 0, 0

    @property
    def code(self) -> int:
        return ProgramExit.NO_GO if self.count else ProgramExit.GO

    @property
    def seen(self) -> str:
        """`0 anomalies, 1 row read`."""
        return f"{_counted(self.count, 'anomaly', 'anomalies')}, {_counted(self.rows, 'row')} read"

    def _screen(self, folder: Path) -> Screen:
        from runbook.tools.screen import Screen
        from runbook.tools.watch import Watcher

        return Screen(watcher=Watcher(folder.resolve(), self.limits))

    def _tell(self, screen: Screen, anomaly: Anomaly) -> None:
        self.count += 1
        screen.found.append(anomaly)
        if self._as_json:
            self.console.json_line(asdict(anomaly))
        else:
            self.console.result(anomaly.line())

    def _warn(self, text: str) -> None:
        self.console.error(f"warning: {text}")

    def read_once(self, folder: Path) -> None:
        """The screen as it is now."""
        screen = self._screen(folder)
        found = screen.watcher.look()
        screen.found += found
        for line in [] if self._as_json else screen.lines():
            self.console.result(line)
        for anomaly in found:
            self._tell(screen, anomaly)
        for line in screen.watcher.blind_spots():
            self._warn(line)
        self.rows += screen.watcher.monitor.readings.rows_read
        self.console.progress(f"read {folder} once; {self.seen}")

    def watch(self, folder: Path, interval_s: float, left: Callable[[], bool] | None) -> None:
        """The screen until the launch is over, or `left`."""
        screen = self._screen(folder)
        screen.watcher.run(
            interval_s=interval_s,
            tell=partial(self._tell, screen),
            warn=self._warn,
            show=_shower(self.console, screen),
            left=left or (lambda: False),
        )
        if self.console.is_live:
            self.console.progress("")
        self.rows += screen.watcher.monitor.readings.rows_read


def _shower(console: Console, screen: Screen) -> Callable[[], None]:
    """The screen redrawn on a terminal; in a pipe one line at most every half minute."""
    said_at = -_SAY_EVERY_S

    def show() -> None:
        nonlocal said_at
        if console.is_live:
            console.draw(*screen.lines())
        elif monotonic() - said_at >= _SAY_EVERY_S or screen.watcher.over:
            said_at = monotonic()
            console.progress(screen.status())

    return show


def _counted(count: int, one: str, more: str = "") -> str:
    return f"{count} {one if count == 1 else more or f'{one}s'}"


def _launch_in(folder: Path, *, once: bool) -> Path:
    """The folder, or of a whole run its newest launch: by the link beside it if that leads there.

    A folder that is not there yet, or still empty, is waited for; only --once cannot wait.
    """
    from nsa.contract import LATEST_LINK, TRAINING_CSV
    from runbook.tools.watch import is_run_directory

    if once and not folder.is_dir():
        hint = "start the run first; it creates its own"
        raise UsageError(f"no such directory: {folder}", hint=hint)
    if is_run_directory(newest_in(folder)) or (folder / LATEST_LINK).is_symlink():
        return folder
    beside = folder.parent / LATEST_LINK
    if beside.is_symlink() and folder.resolve() in beside.resolve().parents:
        return beside
    if newest := _newest_below(folder):
        return newest
    if once:
        hint = f"one has {TRAINING_CSV} or heartbeat_rank*.jsonl"
        raise UsageError(f"nothing to read: {folder} is not a run directory", hint=hint)
    return folder


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
means the run that it names, or the next one if that is over; a whole run means its newest
launch. Through the link `latest` the launches of a run are shown one after the other.
Ends with the run. Limits come from NSA_WATCH_*
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
