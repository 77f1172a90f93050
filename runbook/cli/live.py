"""`runbook watch`: look on at a run that somebody else started, and what its ranks are doing."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING

from runbook import DEFAULT_OUT
from runbook.cli._parser import command
from runbook.cli._runs import folder_of
from runbook.console import Console
from runbook.errors import ProgramExit, UsageError, how_many
from runbook.folder import EVENTS_FILE, OWN_FOLDER, is_going_on, run_folders

if TYPE_CHECKING:
    from runbook.launch.watch.detectors import Anomaly
    from runbook.launch.watch.watchdog import Thresholds
    from runbook.tools.watch import RankStack, Screen


_REDRAW_S = 2.0
_SAY_EVERY_S = 30.0
_LOOK_EVERY_S = 1.0


def _problems(args: argparse.Namespace) -> list[str]:
    beside = {"--halt": args.halt, "--interval": args.interval, "--once": args.once or None}
    given = [name for name, value in beside.items() if value is not None]
    why = "cannot be combined with --stacks, which watches nothing"
    return [f"{name} {why}" for name in given] if args.stacks else []


@command(
    "look on at a run; --halt stops it if it goes bad, --stacks shows each rank",
    json_help="one JSON document per anomaly on stdout; with --stacks one of all ranks",
    options={"halt": {"const": "1", "choices": ("0", "1")}},
    problems=_problems,
)
def watch(args: argparse.Namespace, console: Console) -> int:
    """The operator's screen of a run directory, whoever started the run and whether or not it
    still goes on: its state and the time left, loss, rate, each rank with its memory, the
    age of the last checkpoint, incidents, and what cannot be seen; in a pipe one line every
    30 s. Meanwhile it looks for a stalled heartbeat, throughput readings that no longer
    change, gate collapse, zero or exploding gradients, NaN, loss spikes and memory growth;
    without training.csv, by the heartbeats of rank 0. Without --halt it only reads. With
    it, anomalies go into DIR/anomalies.jsonl and DIR/.anomaly_type, a stalled rank is asked
    for its stack, and DIR/.HALT stops all ranks after the same step. A folder that is still
    empty, or a path (artifacts/RUN) that is not there yet, is waited for, five minutes at
    most; a bare name is there or a run's id. The launch below DIR that wrote last is shown,
    one after the other while their run goes on; in a folder of runs, the next one if the last
    is over. Ends with the run. Limits come from NSA_WATCH_* (see `runbook toggles`).

    --stacks (for short `runbook stacks DIR`) works while a rank is stuck in a collective; a
    frozen rank is read from outside where py-spy is installed. Only processes that carry the
    run's token, or have its heartbeat file open, are touched.

    options:
      directory [DIR]  the run's directory, or a run's id (default: artifacts/latest)
      --halt [0|1]     write .HALT on an anomaly (--halt 0: only read; default:
                       NSA_WATCH_HALT, else 0)
      --interval S     seconds between readings (default: NSA_WATCH_INTERVAL_S, else 30)
      --once           read once and stop
      --stacks         print the Python stack and the last collective of every live rank below DIR,
                       even of one that hangs, and stop; the run goes on

    examples:
      runbook watch artifacts/latest
      runbook watch artifacts/m7c_125m_2xa100_prod --halt 1 --interval 30
      runbook watch artifacts/cpu_smoke/latest --once
      runbook watch --stacks artifacts/latest
    exit codes: 0 no anomaly, 1 at least one, 2 usage, 130 Ctrl-C;
    with --stacks: 0 every live rank answered, 1 one did not, 3 no rank is alive
    """
    from nsa.contract import LATEST_LINK
    from runbook.launch.watch.watchdog import Budgets, Thresholds

    named = args.directory or Path(DEFAULT_OUT) / LATEST_LINK
    if args.stacks:
        return _stacks(console, named)
    folder = folder_of(named)
    limits = Thresholds.from_variables(os.environ)
    # Whoever looks on changes nothing, unless it is asked for here or in the environment.
    told = "NSA_WATCH_HALT" in os.environ and limits.halt
    limits = replace(limits, halt=told if args.halt is None else args.halt == "1")
    interval_s = args.interval or limits.interval_s
    view = _View(console, limits)
    if not folder.is_dir() and (args.once or folder.exists()):
        hint = "start the run first; it creates its own"
        raise UsageError(f"no such directory: {folder}", hint=hint)
    if args.once:
        if (place := newest(folder)) is None:
            hint = "a run writes training.csv or heartbeat_rank*.jsonl"
            raise UsageError(f"nothing to read: no run has written in {folder}", hint=hint)
        view.read_once(place)
        return view.code
    effect = "the run is stopped at an anomaly"
    if not limits.halt:
        effect = "anomalies are only reported; --halt stops the run at one"
    within_s, say = Budgets().silence_s, console.progress
    say(f"watching {folder}; {effect}")
    for place, left in watched(folder, interval_s=interval_s, within_s=within_s, tell=say):
        say(f"now {launch_name(place)}")
        view.watch(place, min(interval_s, _REDRAW_S) if console.is_live else interval_s, left)
    say(f"the run is over; {view.seen}")
    return view.code


def watched(
    folder: Path, *, interval_s: float, within_s: float, tell: Callable[[str], None]
) -> Iterator[tuple[Path, Callable[[], bool]]]:
    """The launches below a folder or behind a link, and what says that one of them was left.

    It is always the one that wrote last. A run that goes on there has a next one to wait for; else
    it ends with the launch. Where there is none yet, or a folder of runs has none that goes on, it
    waits `within_s` at most. Raises UsageError if no run has begun by then.
    """
    from runbook.tools.watch import is_over

    place, seen = newest(folder), set[Path]()
    if place and is_over(place) and folder.resolve() in (run_of(place) or place).parents:
        seen.add(place)
    if place is None or seen:
        why = f"{place} is over" if place else "nothing has written there yet"
        tell(f"waiting for a run to begin in {folder}, {within_s:g} s at most: {why}")
    deadline, begun = monotonic() + within_s, False
    while True:
        on, place = _goes_on(folder), newest(folder)
        if place and place not in seen:
            seen.add(place)
            yield place, partial(_has_left, folder, seen, on)
            begun = True
        elif begun and not on:
            return
        elif not on and monotonic() > deadline:
            raise UsageError(
                f"no run has begun in {folder} within {within_s:g} s",
                hint="start the run, then watch its own directory",
            )
        else:
            sleep(min(interval_s, _LOOK_EVERY_S))


def newest(folder: Path) -> Path | None:
    """The directory that wrote rows or heartbeats last: the folder's own, or one below it.

    A trainer of one's own writes into a folder of its launch.
    """
    from nsa.contract import HEARTBEATS, TRAINING_CSV

    found = []
    for path in _below(folder, 3, TRAINING_CSV, HEARTBEATS.glob(), OWN_FOLDER):
        with suppress(FileNotFoundError):  # its launch is kept aside meanwhile
            found.append((path.stat().st_mtime, path.parent))
    return max(found)[1].resolve() if found else None


def folders_of_ranks(folder: Path) -> list[Path]:
    """Directories with heartbeats: the one that is named, or all of a run's launches."""
    from nsa.contract import HEARTBEATS

    beats = _below(folder, 2, HEARTBEATS.glob())
    return sorted({path.parent.resolve() for path in beats})  # once, with a link `latest` too


def _below(folder: Path, depth: int, *names: str) -> Iterator[Path]:
    """What has one of these names in the folder, or below it in so many; asked at each look."""
    for place, folders, files in os.walk(root := folder.resolve(), followlinks=True):
        found = (one for one in (*folders, *files) if any(fnmatch(one, name) for name in names))
        yield from (Path(place, one) for one in found)
        if len(Path(place).parts) - len(root.parts) == depth:
            folders.clear()


def _goes_on(folder: Path) -> bool:
    """Does a run go on whose next launch would be found there?"""
    run = run_of(folder.resolve())
    out = run.parent if run and folder.is_symlink() else folder
    return any(is_going_on(one) for one in (folder, *run_folders(out)))


def _has_left(folder: Path, seen: set[Path], went_on: bool) -> bool:
    """Has a launch written that was not looked at, or has the run ended that went on?"""
    return newest(folder) not in seen or (went_on and not _goes_on(folder))


def run_of(place: Path) -> Path | None:
    """The folder of the run to which a launch's folder belongs."""
    return next((one for one in place.parents if (one / EVENTS_FILE).is_file()), None)


def launch_name(place: Path) -> str:
    """`production/leg1 of 20261125T030838Z-def662f`; of a launch by hand its path."""
    run = run_of(place)
    return f"{place.relative_to(run).as_posix()} of {run.name}" if run else str(place)


class _View:
    """What is told of the run directories that are looked at."""

    def __init__(self, console: Console, limits: Thresholds) -> None:
        self.console, self.limits = console, limits
        self.count, self.rows = 0, 0

    @property
    def code(self) -> int:
        return ProgramExit.NO_GO if self.count else ProgramExit.GO

    @property
    def seen(self) -> str:
        """`0 anomalies, 1 row read`."""
        return f"{how_many(self.count, 'anomaly', 'anomalies')}, {how_many(self.rows, 'row')} read"

    def _read(self, screen: Screen, anomalies: Iterable[Anomaly], *, blind: bool) -> None:
        """What was found and, with `blind`, what is not watched."""
        for anomaly in anomalies:
            self.count += 1
            if self.console.as_json:
                self.console.json_line(asdict(anomaly))
            else:
                self.console.result(anomaly.line())
        for text in screen.blind_spots() if blind else ():
            self.console.error(f"warning: {text}")

    def read_once(self, folder: Path) -> None:
        """The screen as it is now."""
        from runbook.tools.watch import Screen

        screen = Screen(folder, self.limits)
        found = screen.look()
        for line in [] if self.console.as_json else screen.lines():
            self.console.result(line)
        self._read(screen, found, blind=True)
        self.rows += screen.monitor.readings.rows_read
        self.console.progress(f"read {launch_name(folder)} once; {self.seen}")

    def watch(self, folder: Path, interval_s: float, left: Callable[[], bool]) -> None:
        """The screen until the launch is over, or `left` although no rank has said its end.

        What is not watched is told once it trains or is over.
        """
        from runbook.tools.watch import Screen

        screen, self._said_at = Screen(folder, self.limits), -_SAY_EVERY_S
        screen.ranks.update()
        while True:
            over = screen.over or left()
            self._read(screen, screen.look(), blind=over or screen.trains)
            if screen.over and not over:
                continue  # what it wrote last is read before its end is shown
            self._show(screen)
            if over:
                break
            screen.ranks.wait(interval_s)
        if self.console.is_live:
            self.console.progress("")
        self.rows += screen.monitor.readings.rows_read

    def _show(self, screen: Screen) -> None:
        """The screen redrawn on a terminal; in a pipe one line at most every half minute."""
        if self.console.is_live:
            self.console.draw(*screen.lines())
        elif monotonic() - self._said_at >= _SAY_EVERY_S or screen.over:
            self._said_at = monotonic()
            self.console.progress(screen.status())


def _stacks(console: Console, named: Path) -> int:
    from runbook.tools.watch import live_stacks

    folders = folders_of_ranks(folder_of(named))
    found = [(folder, stack) for folder in folders for stack in live_stacks(folder)]
    rows = [asdict(stack) | {"run_dir": str(folder)} for folder, stack in found]
    lines = [line for one in found for line in _stack_lines(*one)]
    console.tell({"schema_version": 1, "ranks": rows}, lines)
    if found:
        answered = all(stack.stack for _, stack in found)
        return ProgramExit.GO if answered else ProgramExit.NO_GO
    why = "its ranks have ended" if folders else "it has no heartbeat files"
    why = why if named.exists() else "there is no such folder"
    earlier = "; earlier stacks are in its stackdump_rank*.txt" if folders else ""
    console.progress(f"no rank of {named} is alive: {why}{earlier}")
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
