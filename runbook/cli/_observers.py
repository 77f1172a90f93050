"""Who shows a run while it goes on, and what stands at its end."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from runbook.cli.finished import print_reports
from runbook.console import Console, OutputFormat, Painted
from runbook.files import near, typed_here
from runbook.launch.observer import Observer
from runbook.records import RunRecord
from runbook.records.run import Screen


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


def observer_for(console: Console, output: OutputFormat) -> RunView:
    """The observer of this format; what it tells of goes on where nobody reads any more."""
    from runbook.cli._github import GithubObserver
    from runbook.cli._json_lines import JsonObserver
    from runbook.cli._text import TextObserver

    views: dict[OutputFormat, type[RunView]] = {
        OutputFormat.TEXT: TextObserver,
        OutputFormat.JSON: JsonObserver,
        OutputFormat.GITHUB: GithubObserver,
    }
    console.outlive_readers()
    return views[output](console)


def print_summary(console: Console, record: RunRecord, folder: Path) -> None:
    """Print the verdict with its scope, each failure with `try` and `rerun`, and the report.

    A quiet console gets the verdict's line, the fingerprint and the report's path, and on stderr
    what could not be written: a record that was not kept has no fingerprint.
    After an interruption every row that has no evidence would say so; the way to go on is what
    counts then.
    """
    from runbook.engine.outputs import render
    from runbook.engine.refused import NOT_WRITTEN
    from runbook.folder.record import fingerprint_of, shown_fingerprint

    short = console.quiet or record.interrupted
    width = None if short else console.width_out
    screen = Screen(color=console.color_out, width=width, brief=True, program=typed_here())
    text = render(record, "terminal", screen)
    console.page(Painted(text.partition("\n")[0]) if short else text)
    if record.interrupted:
        program = " ".join(record.invocation.program)
        console.result(f"resume  {screen.typed(f'{program} --resume {near(folder)}')}")
    not_kept = [text for text in record.reasons[:1] if text.startswith(NOT_WRITTEN)]
    if not_kept and short:
        console.error(*not_kept)
    if not not_kept:
        console.result(f"fingerprint  {shown_fingerprint(fingerprint_of(record))}")
    print_reports(console, folder, shown=near(folder))
    if console.deaf:
        console.error(f"the run ended with {record.verdict.value}; its files are in {near(folder)}")
