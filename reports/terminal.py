"""The terminal summary: one line a phase, one a required check, and what to do next."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from reports.view import CheckRow, PhaseView, ReportView, build_view, one_line
from runbook.console import painted, style_of
from runbook.records import Outcome, RunRecord, Verdict
from runbook.records.measurement import duration_text
from runbook.records.run import Report, Screen

# More checks than this are named by their phases.
_LISTED = 3


def render_terminal(record: RunRecord, screen: Screen) -> str:
    """Return the summary; without the screen's color it holds no escape codes.

    With a location the last line points there. A brief one is the summary's end alone, for a
    reader who has watched the phases go by.
    """
    view = build_view(record)
    if screen.brief:
        return _joined(_end_lines(view, screen.color))
    lines = [_title(view), *_phase_lines(view, screen.color)]
    if view.acceptance:
        lines += ["", view.required_counts, *_acceptance_lines(view, screen.color)]
    lines += ["", *_end_lines(view, screen.color)]
    if screen.location:
        lines.append(f"report  {one_line(screen.location)}/report.md")
    return _joined(lines)


def _joined(lines: list[str]) -> str:
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _end_lines(view: ReportView, color: bool) -> list[str]:
    lines = [*_verdict_lines(view, color), *_problem_lines(view, color)]
    if view.record.verdict is Verdict.GO and view.record.exports:
        pairs = [f"{name}={shlex.quote(value)}" for name, value in view.record.exports.items()]
        lines.append(f"export {one_line(' '.join(pairs))}")
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


def _verdict_lines(view: ReportView, color: bool) -> list[str]:
    style = style_of(view.record.verdict.value)
    lines = [painted(view.headline, "bold", style) if color else view.headline]
    lines += [f"  {one_line(reason)}" for reason in view.main_reasons]
    if view.interruption:
        lines.append(f"  {view.interruption}")
    lines.append(f"  {view.counts}")
    return lines


def _problem_lines(view: ReportView, color: bool) -> list[str]:
    lines: list[str] = []
    for rows in _alike(view.problems):
        row = rows[0]
        lines += _heading(rows, color)
        if row.outcome == Outcome.SKIPPED and not row.remedy:
            continue
        for path in row.evidence:
            lines.append(f"    see    {one_line(path)}")
        lines.append(f"    try    {one_line(row.remedy)}")
        if rerun := _rerun(rows):
            lines.append(f"    rerun  {one_line(rerun)}")
    return lines


def _alike(problems: Sequence[CheckRow]) -> list[list[CheckRow]]:
    """Rows that send the reader to the same place with the same advice, each group told once.

    One crash leaves a dozen rows without evidence, and eight phases not run are one fact.
    """
    groups: dict[tuple[object, ...], list[CheckRow]] = {}
    for row in problems:
        where = (row.phase, row.evidence) if row.evidence else row.reason
        groups.setdefault((row.outcome, row.required, row.remedy, where), []).append(row)
    return list(groups.values())


def _heading(rows: Sequence[CheckRow], color: bool) -> list[str]:
    row = rows[0]
    mark = "" if row.required else " (not required)"
    if len({other.reason for other in rows}) == 1:
        return [f"{_word(row.outcome, color)}  {_subject(rows)}{mark}  {one_line(row.reason)}"]
    words = [_word(row.outcome, color), *[" " * len(row.outcome)] * (len(rows) - 1)]
    return [
        f"{word}  {other.id}{mark}  {one_line(other.reason)}"
        for word, other in zip(words, rows, strict=True)
    ]


def _subject(rows: Sequence[CheckRow]) -> str:
    if len(rows) <= _LISTED:
        return ", ".join(row.id for row in rows)
    return f"{', '.join(_phases(rows))} ({len(rows)} checks)"


def _rerun(rows: Sequence[CheckRow]) -> str:
    """One command for all rows, if theirs differ in nothing but the phase."""
    phases = ",".join(_phases(rows))
    commands = {row.rerun.replace(f"--phase {row.phase}", f"--phase {phases}") for row in rows}
    return commands.pop() if len(commands) == 1 else rows[0].rerun


def _phases(rows: Sequence[CheckRow]) -> list[str]:
    return list(dict.fromkeys(row.phase for row in rows))


REPORT = Report(file_name="report.txt", render=render_terminal)
