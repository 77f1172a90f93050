"""What GitHub Actions shows beside a change: workflow commands, an annotation a problem."""

from __future__ import annotations

from reports.view import CheckRow, ReportView, build_view, one_line
from runbook.records import Reason, RunRecord
from runbook.records.run import Report, Screen

# GitHub shows ten errors and ten warnings of a step, and drops the others without a word.
_MOST = 10


def escape_data(text: str) -> str:
    """A message of a workflow command: its line must not end, nor a `%` begin an escape."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def escape_property(text: str) -> str:
    """A property's value: `:` and `,` would end it too."""
    return escape_data(text).replace(":", "%3A").replace(",", "%2C")


def command(level: str, title: str, message: str) -> str:
    """`::error title=TITLE::MESSAGE`."""
    return f"::{level} title={escape_property(title)}::{escape_data(message)}"


def render_github(record: RunRecord, _: Screen) -> str:
    """Return the annotations, one command a line: the verdict, what keeps from a GO, warnings.

    `::error` for what keeps from a GO, `::warning` for other problems and for checks that warn;
    of more than GitHub shows, the last one counts the others.
    """
    view = build_view(record)
    errors = [_of_row("error", row) for row in view.problems if row.blocks]
    others = [row for row in view.problems if not row.blocks]
    others += [row for row in view.rows if row.code == Reason.WARNING and not row.is_problem]
    warnings = [_of_row("warning", row) for row in others]
    lines = [*_shown("error", errors), *_shown("warning", warnings), _verdict(view)]
    return "\n".join(lines) + "\n"


def _verdict(view: ReportView) -> str:
    message = "\n".join([view.headline, *map(one_line, view.main_reasons), view.required_counts])
    return command("notice", f"runbook {view.record.verdict}", message)


def _of_row(level: str, row: CheckRow) -> str:
    lines = [row.reason]
    lines += [f"see    {path}" for path in row.evidence]
    lines += [f"try    {row.remedy}"] if row.remedy else []
    lines += [f"rerun  {row.rerun}"] if row.rerun else []
    title = f"{row.outcome} {row.id}" if row.is_problem else f"warning {row.id}"
    return command(level, title, "\n".join(one_line(line) for line in lines))


def _shown(level: str, commands: list[str]) -> list[str]:
    if len(commands) <= _MOST:
        return commands
    left_out = len(commands) - _MOST + 1
    title = f"{left_out} more {level}s"
    more = command(level, title, "GitHub shows ten of a step; the report has all of them")
    return [*commands[: _MOST - 1], more]


REPORT = Report(file_name="annotations.txt", render=render_github)
