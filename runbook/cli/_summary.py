"""What stays on the screen after a run: verdict, what went wrong and what to do, report path."""

from __future__ import annotations

from pathlib import Path

from runbook.cli._runs import near
from runbook.console import Console
from runbook.records import RunRecord

__all__ = ["print_summary"]

_REPORTS = ("report.html", "report.md")


def print_summary(console: Console, record: RunRecord, folder: Path) -> None:
    """Print the verdict with its scope, each failure with `try` and `rerun`, and the report.

    A quiet console gets the verdict's line and the report's path. After an interruption every row
    that has no evidence would say so; the way to go on is what counts then.
    """
    from reports.terminal import render_verdict

    text = render_verdict(record, color=console.color_out).rstrip("\n")
    short = console.quiet or record.interrupted
    console.result(text.partition("\n")[0] if short else text)
    if record.interrupted:
        console.result(f"resume  runbook run --resume {near(folder)}")
    for name in _REPORTS:
        if (folder / name).is_file():
            console.result(f"report  {near(folder / name)}")
