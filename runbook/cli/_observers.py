"""Show a run while it goes on: redrawn on a terminal, plain lines in a pipe, or JSON lines."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from runbook import __version__
from runbook.cli._headline import headline
from runbook.console import Console, printable
from runbook.records import Launch, LaunchResult, Outcome, PhaseRecord, RunRecord

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

__all__ = ["JsonObserver", "RunView", "TextObserver", "observer_for", "short_duration"]

_PLAIN_INTERVAL_S = 30.0
_STYLES = {Outcome.PASS: "good", Outcome.FAIL: "bad", Outcome.SKIPPED: "dim"}


class RunView(AbstractContextManager["RunView"], Protocol):
    """An observer of the engine that also knows the run's folder, once there is one."""

    run_root: Path | None
    reports: Sequence[Path]

    def run_started(
        self, *, run_id: str, run_root: Path, profile: str, scope: str, phases: Sequence[str]
    ) -> None: ...
    def phase_started(
        self, *, phase: str, title: str, index: int, total: int, launches: int
    ) -> None: ...
    def launch_started(self, *, launch: Launch) -> None: ...
    def launch_progress(
        self, *, launch: Launch, step: int, total: int, toks_per_s: float | None
    ) -> None: ...
    def launch_finished(self, *, launch: Launch, result: LaunchResult) -> None: ...
    def phase_finished(self, *, record: PhaseRecord, index: int, total: int) -> None: ...
    def run_finished(
        self, *, record: RunRecord, run_root: Path, reports: Sequence[Path]
    ) -> None: ...
    def note(self, text: str) -> None: ...


def observer_for(args: argparse.Namespace, console: Console) -> RunView:
    """The observer that --json asks for, or else the one for people."""
    return JsonObserver(console) if args.json else TextObserver(console)


def short_duration(seconds: float) -> str:
    """`41 s`, `3 min 20 s` or `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


class TextObserver:
    """One line a phase on stderr; the running launch's step below it where that can be redrawn."""

    def __init__(self, console: Console) -> None:
        self.run_root: Path | None = None
        self.reports: Sequence[Path] = ()
        self._console = console
        self._stack = ExitStack()
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._width = 0
        self._last_line = 0.0

    def __enter__(self) -> Self:
        if self._console.is_live:
            self._progress = self._stack.enter_context(self._console.live(_new_progress()))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def run_started(
        self, *, run_id: str, run_root: Path, profile: str, scope: str, phases: Sequence[str]
    ) -> None:
        self.run_root = run_root
        self._width = max(len(name) for name in phases)
        count = f"{len(phases)} phase{'' if len(phases) == 1 else 's'}"
        self._console.progress(
            f"runbook {__version__}  run {run_id}  profile {profile}  {count}  -> {run_root}"
        )
        self._console.progress(f"scope: {printable(scope)}")

    def phase_started(
        self, *, phase: str, title: str, index: int, total: int, launches: int
    ) -> None:
        count = f", {launches} launches" if launches > 1 else ""
        self._show(f"{index}/{total} {phase}: {title}{count}", total=None)

    def launch_started(self, *, launch: Launch) -> None:
        self._last_line = time.monotonic()
        self._show(f"{launch.phase}/{launch.name}", total=launch.steps or None)

    def launch_progress(
        self, *, launch: Launch, step: int, total: int, toks_per_s: float | None
    ) -> None:
        rate = "" if toks_per_s is None else f"{toks_per_s:,.0f} toks/s".replace(",", " ")
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=step, total=total or None, rate=rate)
        elif time.monotonic() - self._last_line >= _PLAIN_INTERVAL_S:
            self._last_line = time.monotonic()
            self._console.progress(
                f"      {launch.phase}/{launch.name}  step {step}/{total}  {rate}"
            )

    def launch_finished(self, *, launch: Launch, result: LaunchResult) -> None:
        if not result.ok:
            cause = f": {result.cause}" if result.cause else ""
            self._console.progress(
                printable(f"      {launch.phase}/{launch.name} {result.status.value}{cause}")
            )

    def phase_finished(self, *, record: PhaseRecord, index: int, total: int) -> None:
        self._hide()
        digits = len(str(total))
        word = record.outcome.value.ljust(12)
        style = _STYLES.get(record.outcome, "unsure")
        self._console.progress(
            f" {index:>{digits}}/{total} {record.name:<{self._width}}  "
            f"{self._console.paint(word, style, err=True)}  "
            f"{printable(headline(record)):<46}  {short_duration(record.duration_s)}"
        )

    def run_finished(self, *, record: RunRecord, run_root: Path, reports: Sequence[Path]) -> None:
        self._hide()
        self.run_root = run_root
        self.reports = reports
        if record.interrupted:
            self._console.progress("      interrupted: all processes of the run have been ended")

    def note(self, text: str) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, rate=printable(text))
        else:
            self._console.progress(f"      {printable(text)}")

    def _show(self, words: str, *, total: int | None) -> None:
        if self._progress is None:
            return
        self._hide()
        self._task = self._progress.add_task(words, total=total, rate="")

    def _hide(self) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None


def _new_progress() -> Progress:
    from rich.console import Console as RichConsole
    from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
    from rich.progress import TimeElapsedColumn as Elapsed

    return Progress(
        TextColumn("     "),
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}", markup=False),
        Elapsed(),
        console=RichConsole(stderr=True, highlight=False),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )


class JsonObserver:
    """Every event as one JSON line on stdout."""

    def __init__(self, console: Console) -> None:
        self.run_root: Path | None = None
        self.reports: Sequence[Path] = ()
        self._console = console

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None

    def run_started(
        self, *, run_id: str, run_root: Path, profile: str, scope: str, phases: Sequence[str]
    ) -> None:
        self.run_root = run_root
        self._say(
            "run_started",
            run_id=run_id,
            run_root=str(run_root),
            profile=profile,
            scope=scope,
            phases=list(phases),
        )

    def phase_started(
        self, *, phase: str, title: str, index: int, total: int, launches: int
    ) -> None:
        self._say(
            "phase_started", phase=phase, title=title, index=index, total=total, launches=launches
        )

    def launch_started(self, *, launch: Launch) -> None:
        self._say(
            "launch_started",
            phase=launch.phase,
            launch=launch.name,
            command=launch.command_line(),
            steps=launch.steps,
        )

    def launch_progress(
        self, *, launch: Launch, step: int, total: int, toks_per_s: float | None
    ) -> None:
        self._say(
            "launch_progress",
            phase=launch.phase,
            launch=launch.name,
            step=step,
            total=total,
            toks_per_s=toks_per_s,
        )

    def launch_finished(self, *, launch: Launch, result: LaunchResult) -> None:
        self._say(
            "launch_finished",
            phase=launch.phase,
            launch=launch.name,
            result=result.model_dump(mode="json"),
        )

    def phase_finished(self, *, record: PhaseRecord, index: int, total: int) -> None:
        self._say(
            "phase_finished",
            phase=record.name,
            index=index,
            total=total,
            outcome=record.outcome.value,
            duration_s=record.duration_s,
            checks=[check.model_dump(mode="json") for check in record.checks],
            choices=record.choices,
        )

    def run_finished(self, *, record: RunRecord, run_root: Path, reports: Sequence[Path]) -> None:
        self.run_root = run_root
        self.reports = reports
        self._say(
            "run_finished",
            run_id=record.run_id,
            run_root=str(run_root),
            verdict=record.verdict.value,
            scope=record.scope,
            reasons=list(record.reasons),
            interrupted=record.interrupted,
            exports=record.exports,
            reports=[str(path) for path in reports],
        )

    def note(self, text: str) -> None:
        self._say("note", text=text)

    def _say(self, event: str, **fields: object) -> None:
        self._console.json_line({"event": event, **fields})
