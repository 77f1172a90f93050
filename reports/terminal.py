"""The terminal summary: one line a phase, one a required check, and what to do next.

Behind it what GitHub Actions shows beside a change: workflow commands, an annotation a problem.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from reports.cases import accused_of
from reports.causes import Cause
from reports.text import bound_text, check_value, export_line, limit_text, one_line
from reports.view import STEPS, ReportView, build_view, permit_of
from runbook.console import rendered, style_of, table_of, whole
from runbook.errors import how_many, with_program
from runbook.records import Check, PhaseRecord, Reason, RunRecord, Verdict
from runbook.records.measurement import duration_text
from runbook.records.run import Report, Screen, Step

if TYPE_CHECKING:
    from rich.console import RenderableType

# More causes than this are told without advice.
_WHOLE = 3
_REASONS = 2


def render_terminal(record: RunRecord, screen: Screen) -> str:
    """Return the summary; without the screen's color it holds no escape codes.

    A brief one is the summary's end alone, for a reader who has watched the phases go by.
    """
    view = build_view(record)
    parts = [*_end(view, screen)]
    if not screen.brief:
        parts = [_title(view), *_phases(view), *_acceptance(view), "", *parts]
    return rendered(*parts, width=screen.width, color=screen.color, end="\n")


def _end(view: ReportView, screen: Screen) -> Iterator[RenderableType]:
    yield from _verdict(view, terse=screen.terse)
    yield from _causes(view, screen)
    for one in accused_of(view.record):
        text = f"{one['node']} ({one['confidence']})  {one['command']}"
        yield whole(f"    node   {one_line(text)}")
    if view.record.verdict is Verdict.GO and view.record.exports and not screen.terse:
        if view.record.of_own_trainer:
            yield _told("Start your trainer as you do, with this in its shell:")
        yield whole(export_line(view.record.exports))
    for name, step in zip(STEPS, view.following, strict=False):
        if step.command not in view.told:
            yield whole(f"  {name}   {one_line(screen.typed(step.command))}")


def _outcome(outcome: str, text: str) -> RenderableType:
    from rich.text import Text

    return Text.assemble((outcome, style_of(outcome)), f"  {one_line(text)}")


def _title(view: ReportView) -> str:
    run = view.record
    facts = [f"runbook {run.tool_version}", f"run {run.run_id}", f"profile {run.profile}"]
    facts.append(how_many(len(_asked_for(view)), "phase"))
    return "  ".join(one_line(fact) for fact in facts)


def _phases(view: ReportView) -> Iterator[RenderableType]:
    asked_for = _asked_for(view)
    total = str(len(asked_for))
    rows = [
        (
            f" {_place(phase, asked_for):>{2 * len(total) + 1}} {one_line(phase.name)}",
            f"{phase.outcome.value:<12}",
            "not asked for" if phase.left_out else one_line(phase.tally),
            duration_text(phase.duration_s),
        )
        for phase in view.phases
    ]
    if rows:
        yield table_of((), rows, styled=1)


def _asked_for(view: ReportView) -> list[PhaseRecord]:
    """The phases as they were counted while they ran."""
    return [phase for phase in view.phases if not phase.left_out]


def _place(phase: PhaseRecord, asked_for: Sequence[PhaseRecord]) -> str:
    return f"{asked_for.index(phase) + 1}/{len(asked_for)}" if phase in asked_for else "-"


def _acceptance(view: ReportView) -> Iterator[RenderableType]:
    if view.acceptance:
        rows = [
            (f"  {row.outcome:<12}", one_line(row.id), _provenance(row))
            for row in view.acceptance
            if not row.left_out  # counted by phase in the last lines
        ]
        yield from ("", view.required_counts, table_of((), rows, styled=0))


def _provenance(row: Check) -> str:
    measured, limit = row.measurement, bound_text(row)
    if measured is None:
        return one_line(row.reason)
    window = [str(measured.window)] if measured.window else []
    parts = ", ".join([f"n={measured.n}", *window, measured.where])
    return one_line(f"{check_value(row)} ({parts})") + (f"  {limit}" if limit else "")


def _verdict(view: ReportView, *, terse: bool) -> Iterator[RenderableType]:
    from rich.text import Text

    record = view.record
    yield Text(view.headline, style=f"bold {style_of(record.verdict.value)}")
    if terse:
        return
    told = [permit_of(record).says, *view.own_reasons[:_REASONS], view.interruption, view.tally]
    yield from (_told(one_line(text)) for text in told if text)
    if (left_out := record.left_out()) and record.verdict is not Verdict.PARTIAL:
        phases = dict.fromkeys(name.partition(".")[0] for name in left_out)
        checks = f"{len(left_out)} required checks were not asked for"
        yield _told(f"{checks}: {', '.join(phases)}")


def _told(text: str, name: str = "") -> RenderableType:
    """A line below another, with its name before it; what wraps begins under its text."""
    return table_of((), [(f"    {name:<5}", text)]) if name else _indented(text)


def _indented(text: str) -> RenderableType:
    from rich.padding import Padding
    from rich.text import Text

    return Padding(Text(text), (0, 0, 0, 2))


def _causes(view: ReportView, screen: Screen) -> Iterator[RenderableType]:
    """The causes that keep the run from GO with what to do; of the others a line each."""
    blocking = [cause for cause in view.causes if cause.blocks]
    told = 0 if screen.terse else _WHOLE
    for cause in blocking[:told]:
        yield from _whole_cause(cause, screen, word=_word(view, cause))
    for cause in blocking[told:]:
        yield _outcome(cause.lead.outcome.value, cause.headline)
        if cause.advice.command:
            yield whole(f"    {_word(view, cause):<5}  {screen.typed(cause.advice.command)}")
    for cause in view.causes:
        if not (cause.blocks or screen.terse):
            yield _outcome(cause.lead.outcome.value, f"{cause.headline} (not required)")


def _word(view: ReportView, cause: Cause) -> str:
    """Next is what the cause asks for, unless the run was cut off: then it goes on first."""
    steps = {step.command for step in view.following}
    return "rerun" if view.interruption and cause.advice.command not in steps else "next"


def _whole_cause(cause: Cause, screen: Screen, *, word: str) -> Iterator[RenderableType]:
    yield _outcome(cause.lead.outcome.value, cause.headline)
    for name, text in cause.told:
        typed = one_line(with_program(screen.typed(text), screen.program))
        if name in ("next", "rerun"):
            yield whole(f"    {word if name == 'next' else name:<5}  {typed}")
        elif name != "rows" or len(cause.rows) > 1:
            yield _told(typed, name)


def _following(record: RunRecord) -> tuple[Step, ...]:
    return build_view(record).following


TERMINAL = Report(file_name="report.txt", render=render_terminal, following=_following)


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
    lines = [*_shown("error", errors), *_shown("warning", warnings), _verdict_line(view)]
    return "\n".join(lines) + "\n"


def _verdict_line(view: ReportView) -> str:
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


GITHUB = Report(file_name="annotations.txt", render=render_github)
