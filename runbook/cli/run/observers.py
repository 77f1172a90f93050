"""Who shows a run while it goes on, and what stands at its end: to programs and on GitHub, too.

For programs each event is one JSON line, as docs/events.schema.json says.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runbook.cli._runs import print_made
from runbook.cli.run.text import RunView, TextObserver
from runbook.config.registry import report_files
from runbook.console import Console, OutputFormat, Painted
from runbook.engine.derive import NOT_WRITTEN, render
from runbook.files import near, typed_here, utc_text_ms
from runbook.folder.manifest import fingerprint_of, shown_fingerprint
from runbook.launch import observer as events
from runbook.launch.observer import Forecast, Pulse
from runbook.records import Launch, LaunchResult, PhaseRecord, RunRecord
from runbook.records.run import Screen

_SUMMARY, _OUTPUT = "GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT"
_STEP_EVERY_S, _FORECAST_EVERY_S = 0.5, 10.0
# What a runner takes for a command: `::` where a line begins, or the older `##[` anywhere.
_COMMAND = re.compile(r"^(\s*:):|(##)\[", re.MULTILINE)


def harmless(text: str) -> str:
    """The text with nothing in it that a runner would obey."""
    return _COMMAND.sub(lambda found: f"{found[1]} :" if found[1] else f"{found[2]} [", text)


class LogConsole(Console):
    """A console for a log that obeys commands; progress goes to stdout too.

    A runner puts the two streams together as they come, and a line beside its group tells nothing.
    """

    def __init__(self, console: Console) -> None:
        super().__init__(
            stdout=console.stdout, stderr=console.stdout, quiet=console.quiet, live=False
        )
        self.outlive_readers()

    def _page(self, text: str) -> str:
        return harmless(super()._page(text))

    def commands(self, text: str) -> None:
        """Workflow commands, escaped already."""
        self._write(self.stdout, super()._page(text))


class JsonObserver(RunView):
    """Tells everything at once, but steps and forecasts only so often, and ranks when they change.

    The last step of a launch is always told.
    """

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console)
        self._clock = clock
        self._step_at = -math.inf
        self._held: events.StreamEvent | None = None
        self._forecast_at = -math.inf
        self._shape: tuple[object, ...] = ()

    def _announce(self, run_id: str) -> None:
        place = {"run_id": run_id, "run_root": self.run_root}
        self._say(_told(events.RunStarted, **place, phases=self._order))

    def phase_started(self, name: str, title: str, launches: int) -> None:
        self._say(_told(events.PhaseStarted, phase=name, title=title, launches=launches))

    def launch_started(self, launch: Launch, attempt: int) -> None:
        self._tell_held()
        self._step_at, self._shape = -math.inf, ()
        command = launch.command_line()
        self._say(_of(launch, events.LaunchStarted, launch, attempt=attempt, command=command))

    def launch_progress(
        self, launch: Launch, step: int, total: int, toks_per_s: float | None
    ) -> None:
        rate = toks_per_s if toks_per_s is not None and math.isfinite(toks_per_s) else None
        event = _of(launch, events.LaunchProgress, step=step, total=total, toks_per_s=rate)
        now = self._clock()
        if now < self._step_at + _STEP_EVERY_S:
            self._held = event
            return
        self._step_at, self._held = now, None
        self._say(event)

    def launch_ranks(self, launch: Launch, pulse: Pulse) -> None:
        # All but the seconds: these grow with each look.
        shape = pulse.alive, pulse.wanted, pulse.busy, tuple(one.rank for one in pulse.silent)
        if shape != self._shape:
            self._shape = shape
            self._say(_of(launch, events.LaunchRanks, pulse))

    def run_forecast(self, forecast: Forecast) -> None:
        now = self._clock()
        if now >= self._forecast_at + _FORECAST_EVERY_S:
            self._forecast_at = now
            self._say(_told(events.RunForecast, forecast))

    def launch_finished(self, launch: Launch, result: LaunchResult) -> None:
        self._tell_held()
        self._say(_of(launch, events.LaunchFinished, result=result))

    def phase_finished(self, record: PhaseRecord) -> None:
        self._say(_told(events.PhaseFinished, record, phase=record.name))

    def run_finished(self, record: RunRecord, run_root: str) -> None:
        fingerprint = fingerprint_of(record)
        self._say(_told(events.RunFinished, record, run_root=run_root, fingerprint=fingerprint))

    def note(self, text: str) -> None:
        self._say(_told(events.Note, text=text))

    def _tell_held(self) -> None:
        if self._held is not None:
            self._say(self._held)
            self._held = None

    def _say(self, event: events.StreamEvent) -> None:
        self._console.json_line(event.model_dump(mode="json"))


def _told(
    kind: type[events.StreamEvent], source: object = None, **fields: Any
) -> events.StreamEvent:
    """The event now; `source` has what is not given by name."""
    own = {*events.StreamEvent.model_fields, "event", *fields}
    taken = {name: getattr(source, name) for name in kind.model_fields if name not in own}
    return kind(ts=utc_text_ms(), **taken, **fields)


def _of(
    launch: Launch, kind: type[events.StreamEvent], source: object = None, **fields: Any
) -> events.StreamEvent:
    return _told(kind, source, phase=launch.phase, launch=launch.name, **fields)


def tell_github(console: LogConsole, record: RunRecord, folder: Path, *, exit_code: int) -> None:
    """Annotations on stdout; the step's summary and outputs where GitHub says to put them.

    A file that cannot be written is said, and changes nothing of the verdict.
    """
    console.commands(render(record, "github").rstrip("\n"))
    outputs = {
        "verdict": record.verdict.value,
        "exit_code": str(exit_code),
        "run": str(folder),
        "fingerprint": fingerprint_of(record),
        "report": str(folder / report_files()["md"]),
    }
    text = "".join(f"{name}={' '.join(value.split())}\n" for name, value in outputs.items())
    _append(console, _OUTPUT, text)
    _append(console, _SUMMARY, render(record, "md"))


def _append(console: Console, name: str, text: str) -> None:
    path = os.environ.get(name)
    if not path:
        return
    try:
        with Path(path).open("a", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        console.error(f"warning: ${name} ({path}) cannot be written: {error.strerror or error}")


def observer_for(console: Console, output: OutputFormat) -> RunView:
    """The observer of this format; what it tells of goes on where nobody reads any more."""
    console.outlive_readers()
    if output is OutputFormat.JSON:
        return JsonObserver(console)
    return TextObserver(LogConsole(console) if output is OutputFormat.GITHUB else console)


def print_summary(console: Console, record: RunRecord, folder: Path) -> None:
    """Print the verdict with its scope, each failure with `try` and `rerun`, and the report.

    A quiet console gets the verdict's line, each cause with its next command, the fingerprint and
    the report's path, and on stderr what could not be written: a record that was not kept has no
    fingerprint.
    After an interruption every row that has no evidence would say so; the way to go on is what
    counts then.
    """
    short = console.quiet or record.interrupted
    screen = Screen(
        color=console.color_out,
        width=None if short else console.width_out,
        brief=True,
        terse=console.quiet,
        program=typed_here(),
    )
    text = render(record, "terminal", screen)
    console.page(Painted(text.partition("\n")[0]) if record.interrupted else text)
    if record.interrupted:
        again = record.invocation.resume_line(record.run_id)
        console.result(f"resume  {screen.typed(again)}")
    not_kept = [text for text in record.reasons[:1] if text.startswith(NOT_WRITTEN)]
    if not_kept and short:
        console.error(*not_kept)
    if not not_kept:
        console.result(f"fingerprint  {shown_fingerprint(fingerprint_of(record))}")
    print_made(console, folder, record, shown=near(folder))
    if console.deaf:
        console.error(f"the run ended with {record.verdict.value}; its files are in {near(folder)}")
