"""The terminal summary: one line a phase, one a required check, and what to do next."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from reports.causes import Cause
from reports.permits import permit_of
from reports.view import CheckRow, PhaseView, ReportView, build_view, one_line
from runbook.console import page_of, painted, style_of
from runbook.records import RunRecord, Verdict
from runbook.records.measurement import duration_text
from runbook.records.run import Report, Screen

# More checks than this are counted; more causes than this are told without advice.
_LISTED = 3
_WHOLE = 3
_REASONS = 2


def render_terminal(record: RunRecord, screen: Screen) -> str:
    """Return the summary; without the screen's color it holds no escape codes.

    A brief one is the summary's end alone, for a reader who has watched the phases go by.
    """
    view = build_view(record)
    if screen.brief:
        return _joined(_end_lines(view, screen))
    lines = [_title(view), *_phase_lines(view, screen.color)]
    if view.acceptance:
        lines += ["", view.required_counts, *_acceptance_lines(view, screen.color)]
    lines += ["", *_end_lines(view, screen)]
    return _joined(lines)


def _joined(lines: list[str]) -> str:
    return page_of(line.rstrip() for line in lines) + "\n"


def _end_lines(view: ReportView, screen: Screen) -> list[str]:
    lines = [*_verdict_lines(view, screen), *_cause_lines(view, screen)]
    if view.record.verdict is Verdict.GO and view.record.exports:
        pairs = [f"{name}={shlex.quote(value)}" for name, value in view.record.exports.items()]
        lines.append(f"export {one_line(' '.join(pairs))}")
    if command := permit_of(view.record).command:
        lines.append(f"  next   {one_line(screen.typed(command))}")
    return lines


def _word(outcome: str, color: bool, *, width: int = 0) -> str:
    """The outcome in its color, padded to a column."""
    word = painted(outcome, style_of(outcome)) if color else outcome
    return word + " " * (width - len(outcome))


def _title(view: ReportView) -> str:
    run = view.record
    count = len(view.phases)
    facts = [f"runbook {run.tool_version}", f"run {run.run_id}", f"profile {run.profile}"]
    facts.append(f"{count} phase{'' if count == 1 else 's'}")
    return "  ".join(one_line(fact) for fact in facts)


def _phase_lines(view: ReportView, color: bool) -> list[str]:
    width = max((len(one_line(phase.record.name)) for phase in view.phases), default=0)
    total = len(view.phases)
    digits = len(str(total))
    facts = max((len(_phase_facts(phase)) for phase in view.phases), default=0)
    return [
        f" {phase.index:>{digits}}/{total} {one_line(phase.record.name):<{width}}  "
        f"{_word(phase.record.outcome.value, color, width=12)}  {_phase_facts(phase):<{facts}}  "
        f"{duration_text(phase.record.duration_s)}"
        for phase in view.phases
    ]


def _phase_facts(phase: PhaseView) -> str:
    if not phase.rows:
        return "no checks"
    if all(row.left_out for row in phase.rows):
        return "not asked for"
    flaky = f", FLAKY: {one_line(', '.join(phase.record.flaky))}" if phase.record.flaky else ""
    return f"checks: {phase.passed}{flaky}"


def _acceptance_lines(view: ReportView, color: bool) -> list[str]:
    width = max(len(one_line(row.id)) for row in view.acceptance)
    return [
        f"  {_word(row.outcome, color, width=12)}  {one_line(row.id):<{width}}  {_provenance(row)}"
        for row in view.acceptance
    ]


def _provenance(row: CheckRow) -> str:
    if not row.path:
        return one_line(row.reason)
    parts = [f"n={row.n}", row.window, row.path]
    provenance = f"{row.value} ({', '.join(part for part in parts if part)})"
    limit = f"  {row.limit}" if row.limit else ""
    return one_line(provenance) + limit


def _verdict_lines(view: ReportView, screen: Screen) -> list[str]:
    style = style_of(view.record.verdict.value)
    lines = [painted(view.headline, "bold", style) if screen.color else view.headline]
    lines.append(f"  {permit_of(view.record).says}")
    lines += [f"  {one_line(reason)}" for reason in view.own_reasons[:_REASONS]]
    if view.interruption:
        lines.append(f"  {view.interruption}")
    return [*lines, f"  {view.tally}", *_left_out_lines(view, screen)]


def _left_out_lines(view: ReportView, screen: Screen) -> list[str]:
    """What was not asked for, and the command that adds it."""
    if not view.left_out:
        return []
    if view.record.verdict is Verdict.PARTIAL:
        return [f"  add    {one_line(screen.typed(view.adds))}"]
    phases = dict.fromkeys(name.partition(".")[0] for name in view.left_out)
    return [f"  {len(view.left_out)} required checks were not asked for: {', '.join(phases)}"]


def _cause_lines(view: ReportView, screen: Screen) -> list[str]:
    """The causes that keep the run from GO with what to do; of the others a line each."""
    blocking = [cause for cause in view.causes if cause.blocks]
    lines = [line for cause in blocking[:_WHOLE] for line in _whole_cause(cause, screen)]
    for cause in blocking[_WHOLE:]:
        lines.append(_title_line(cause, screen.color))
        lines += [f"    rerun  {one_line(screen.typed(cause.rerun))}"] if cause.rerun else []
    return lines + [_title_line(cause, screen.color) for cause in view.causes if not cause.blocks]


def _title_line(cause: Cause, color: bool) -> str:
    mark = "" if cause.blocks else " (not required)"
    return f"{_word(cause.outcome.value, color)}  {one_line(cause.headline)}{mark}"


def _whole_cause(cause: Cause, screen: Screen) -> list[str]:
    advice, lines = cause.advice, [_title_line(cause, screen.color)]
    if cause.title != cause.headline:
        lines.append(f"    what   {one_line(cause.title)}")
    lines += [f"    why    {one_line(text)}" for text in (*advice.likely, advice.seen) if text]
    if cause.folded:
        lines.append(f"    rows   {one_line(_rows(cause.rows))}")
    lines += [f"    see    {one_line(path)}" for path in cause.evidence]
    following = advice.command if advice.command != cause.rerun else ""
    told = {"next": following, "try": cause.remedy, "rerun": cause.rerun}
    shown = {name: screen.typed(text) for name, text in told.items() if text}
    return lines + [f"    {name:<5}  {one_line(text)}" for name, text in shown.items()]


def _rows(rows: Sequence[CheckRow]) -> str:
    """`26 checks: a.b, a.c, d.e and 23 more of a, d`."""
    names = ", ".join(row.id for row in rows[:_LISTED])
    more = rows[_LISTED:]
    phases = ", ".join(dict.fromkeys(row.phase for row in more))
    return f"{len(rows)} checks: {names}{f' and {len(more)} more of {phases}' if more else ''}"


REPORT = Report(file_name="report.txt", render=render_terminal)
