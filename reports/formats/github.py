"""What GitHub Actions shows beside a change: workflow commands, an annotation a problem."""

from __future__ import annotations

from reports.causes import Cause
from reports.text import check_value, limit_text, one_line
from reports.view import STEPS, ReportView, build_view
from runbook.records import Check, Reason, RunRecord
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
    """Return the annotations, one command a line: a cause each, and the verdict.

    `::error` for what keeps from a GO, `::warning` for other problems and for checks that warn;
    of more than GitHub shows, the last one counts the others.
    """
    view = build_view(record)
    errors = [_of_cause("error", cause) for cause in view.causes if cause.blocks]
    warnings = [_of_cause("warning", cause) for cause in view.causes if not cause.blocks]
    warnings += [_of_row(row) for row in view.rows if row.code == Reason.WARNING]
    lines = [*_shown("error", errors), *_shown("warning", warnings), _verdict(view)]
    return "\n".join(lines) + "\n"


def _verdict(view: ReportView) -> str:
    """The verdict with its reasons and the numbers that decided: those held against a limit."""
    lines = [view.headline, *map(one_line, view.record.reasons[:2]), view.required_counts]
    lines += [
        f"{row.id}: {check_value(row)} (n={row.measurement.n}), limit {limit}"
        for row in view.acceptance
        if row.measurement and (limit := limit_text(row))
    ]
    lines += [
        f"{name}: {one_line(step.command)}"
        for name, step in zip(STEPS, view.following, strict=False)
    ]
    return command("notice", f"runbook {view.record.verdict}", "\n".join(lines))


def _of_cause(level: str, cause: Cause) -> str:
    """One annotation for one fault, however many checks follow from it."""
    lines = [f"{name}: {text}" for name, text in cause.told if name != "what"]
    return _annotation(level, f"{cause.lead.outcome} {cause.headline}", cause.lead.reason, *lines)


def _of_row(row: Check) -> str:
    """A check that passed and warns."""
    told = [*(("see", path) for path in row.evidence), ("try", row.remedy), ("rerun", row.rerun)]
    lines = [f"{name}: {text}" for name, text in told if text]
    return _annotation("warning", f"warning {row.id}", row.reason, *lines)


def _annotation(level: str, title: str, *lines: str) -> str:
    return command(level, one_line(title), "\n".join(map(one_line, lines)))


def _shown(level: str, commands: list[str]) -> list[str]:
    if len(commands) <= _MOST:
        return commands
    left_out = len(commands) - _MOST + 1
    title = f"{left_out} more {level}s"
    more = command(level, title, "GitHub shows ten of a step; the report has all of them")
    return [*commands[: _MOST - 1], more]


REPORT = Report(file_name="annotations.txt", render=render_github)
