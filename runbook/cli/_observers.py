"""Show a run while it goes on: redrawn on a terminal, plain lines in a pipe, or JSON lines."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Self

from runbook import __version__
from runbook.console import Console, printable, style_of
from runbook.launch.observer import Observer
from runbook.records import (
    Check,
    Comparator,
    Launch,
    LaunchResult,
    Measurement,
    Outcome,
    PhaseRecord,
    RunRecord,
)
from runbook.records.measurement import TOKENS_PER_SECOND, duration_text, plain_number
from runbook.records.run import Screen

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


_PLAIN_INTERVAL_S = 30.0
_INDENT = "      "


class RunView(Observer, ExitStack):
    """An observer for the time of a `with` block; it knows the run's folder once there is one."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.run_root = ""
        self._console = console
        self._order: tuple[str, ...] = ()

    def run_started(self, run_id: str, run_root: str, phases: tuple[str, ...]) -> None:
        """Remember the folder and the order of the phases."""
        self.run_root = run_root
        self._order = phases
        self._announce(run_id)

    def _announce(self, run_id: str) -> None:
        raise NotImplementedError

    def _place(self, phase: str) -> str:
        """`3/9`, or nothing for a phase that was not announced."""
        if phase not in self._order:
            return ""
        total = str(len(self._order))
        return f"{self._order.index(phase) + 1:>{len(total)}}/{total}"


def observer_for(console: Console, *, as_json: bool) -> RunView:
    """The observer for a program, or the one for people."""
    return JsonObserver(console) if as_json else TextObserver(console)


class TextObserver(RunView):
    """One line a phase on stderr; the running launch's step below it where that can be redrawn."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._last_line = 0.0
        self._last_note = ""

    def __enter__(self) -> Self:
        if self._console.is_live:
            self._progress = self.enter_context(self._console.live(_new_progress()))
            self.callback(self._hide)
        return self

    def _announce(self, run_id: str) -> None:
        count = f"{len(self._order)} phase{'' if len(self._order) == 1 else 's'}"
        where = near(self.run_root)
        self._console.progress(f"runbook {__version__}  run {run_id}  {count}  -> {where}")

    def phase_started(self, name: str, title: str, launches: int) -> None:
        """Show the phase until its first launch starts."""
        count = f", {launches} launches" if launches > 1 else ""
        self._show(f"{self._place(name)} {name}: {title}{count}")

    def launch_started(self, launch: Launch, attempt: int) -> None:
        """Show the launch with its steps."""
        self._last_line = time.monotonic()
        again = f" (attempt {attempt})" if attempt > 1 else ""
        where = f"{self._place(launch.phase)} {launch.phase}/{launch.name}{again}"
        self._show(where)
        if attempt > 1:
            self._console.progress(f"{_INDENT}{launch.phase}/{launch.name} starts again{again}")

    def launch_progress(
        self, launch: Launch, step: int, total: int, toks_per_s: float | None
    ) -> None:
        """Move the step; in a pipe a line from time to time."""
        rate = "" if toks_per_s is None else f"  {toks_per_s:,.0f} tok/s".replace(",", " ")
        now = f"step {step}/{total}{rate}"
        if self._progress is not None:
            if self._task is not None:
                self._progress.update(self._task, now=now)
        elif time.monotonic() - self._last_line >= _PLAIN_INTERVAL_S:
            self._last_line = time.monotonic()
            where = f"{launch.phase}/{launch.name}"
            self._console.progress(f"{_INDENT}{where}  {now}")

    def launch_finished(self, launch: Launch, result: LaunchResult) -> None:
        """A line only if it did not end well, and only if the watchdog has not said so already."""
        told = bool(result.cause) and result.cause in self._last_note
        if not result.ok and not told:
            cause = f": {result.cause}" if result.cause else ""
            text = f"{launch.phase}/{launch.name} {result.status.value}{cause}"
            self._console.progress(_INDENT + printable(text))

    def phase_finished(self, record: PhaseRecord) -> None:
        """The phase's line: outcome, its throughput if it has one, checks, time."""
        self._hide()
        width = max((len(name) for name in self._order), default=0)
        word = record.outcome.value
        painted = self._console.paint(word.ljust(12), style_of(word), err=True)
        self._console.progress(
            f" {self._place(record.name)} {record.name:<{width}}  {painted}  "
            f"{printable(headline(record)):<56}  {duration_text(record.duration_s)}"
        )

    def run_finished(self, record: RunRecord, run_root: str) -> None:
        """Stop drawing; the summary follows on stdout."""
        self._hide()
        self.run_root = run_root
        if record.interrupted:
            self._console.progress(f"{_INDENT}interrupted; no process of the run is left")

    def note(self, text: str) -> None:
        """A line for a person."""
        self._last_note = text
        self._console.progress(_INDENT + printable(text))

    def _show(self, words: str) -> None:
        if self._progress is not None:
            self._hide()
            self._task = self._progress.add_task(words, total=None, now="")

    def _hide(self) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None


def _new_progress() -> Progress:
    from rich.console import Console as RichConsole
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        TextColumn("{task.fields[now]}", markup=False),
        TimeElapsedColumn(),
        console=RichConsole(stderr=True, highlight=False),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )


class JsonObserver(RunView):
    """Every event as one JSON line on stdout."""

    def _announce(self, run_id: str) -> None:
        self._say("run_started", run_id=run_id, run_root=self.run_root, phases=list(self._order))

    def phase_started(self, name: str, title: str, launches: int) -> None:
        self._say("phase_started", phase=name, title=title, launches=launches)

    def launch_started(self, launch: Launch, attempt: int) -> None:
        command = launch.command_line()
        self._say_of("launch_started", launch, attempt=attempt, steps=launch.steps, command=command)

    def launch_progress(
        self, launch: Launch, step: int, total: int, toks_per_s: float | None
    ) -> None:
        self._say_of("launch_progress", launch, step=step, total=total, toks_per_s=toks_per_s)

    def launch_finished(self, launch: Launch, result: LaunchResult) -> None:
        self._say_of("launch_finished", launch, result=result.model_dump(mode="json"))

    def phase_finished(self, record: PhaseRecord) -> None:
        self._say(
            "phase_finished",
            phase=record.name,
            outcome=record.outcome.value,
            duration_s=record.duration_s,
            flaky=list(record.flaky),
            checks=[check.model_dump(mode="json") for check in record.checks],
            choices=record.choices,
        )

    def run_finished(self, record: RunRecord, run_root: str) -> None:
        self.run_root = run_root
        self._say(
            "run_finished",
            run_id=record.run_id,
            run_root=run_root,
            verdict=record.verdict.value,
            headline=record.headline,
            scope=record.scope,
            caveats=list(record.caveats),
            reasons=list(record.reasons),
            interrupted=record.interrupted,
            exports=record.exports,
        )

    def note(self, text: str) -> None:
        self._say("note", text=text)

    def _say_of(self, event: str, launch: Launch, **fields: object) -> None:
        self._say(event, phase=launch.phase, launch=launch.name, **fields)

    def _say(self, event: str, **fields: object) -> None:
        self._console.json_line({"event": event, **fields})


def headline(record: PhaseRecord) -> str:
    """A throughput with sample size and limit if one was measured, and the passed checks."""
    passed = sum(check.outcome is Outcome.PASS for check in record.checks)
    shown = sum(check.outcome is not Outcome.SKIPPED for check in record.checks)
    count = f"{passed} of {shown} checks" if shown else "no checks"
    count += f", FLAKY: {', '.join(record.flaky)}" if record.flaky else ""
    for check in record.checks:
        if check.measurement is not None and check.measurement.unit == TOKENS_PER_SECOND:
            return f"{_rate(check, check.measurement)}  {count}"
    return count


def _rate(check: Check, measured: Measurement) -> str:
    spread = f" +- {measured.stdev:.3g}" if measured.stdev is not None else ""
    text = f"{plain_number(measured.value)}{spread} {measured.unit} (n={measured.n})"
    if isinstance(check.limit, int | float) and check.comparator is not Comparator.NONE:
        text += f" {check.comparator.value} {check.limit:g}"
    return text


def near(path: str | Path) -> str:
    """The path as one would type it here: relative if it lies below the current folder."""
    absolute, here = Path(path).absolute(), Path.cwd()
    return str(absolute.relative_to(here)) if absolute.is_relative_to(here) else str(absolute)


def print_summary(console: Console, record: RunRecord, folder: Path) -> None:
    """Print the verdict with its scope, each failure with `try` and `rerun`, and the report.

    A quiet console gets the verdict's line and the report's path. After an interruption every row
    that has no evidence would say so; the way to go on is what counts then.
    """
    from runbook.engine.outputs import render

    text = render(record, "terminal", Screen(color=console.color_out, brief=True)).rstrip("\n")
    short = console.quiet or record.interrupted
    console.result(text.partition("\n")[0] if short else text)
    if record.interrupted:
        console.result(f"resume  runbook run --resume {near(folder)}")
    for name in ("report.html", "report.md"):
        if (folder / name).is_file():
            console.result(f"report  {near(folder / name)}")
