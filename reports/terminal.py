"""The terminal summary: one line a phase, one a required check, and what to do next."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from reports.view import CheckRow, PhaseView, ReportView, build_view, one_line
from runbook.records import Outcome, RunRecord, Verdict
from runbook.records.measurement import duration_text
from runbook.records.report import Report, Screen

_RED, _GREEN, _YELLOW, _DIM, _BOLD = "31", "32", "33", "2", "1"
# More rows than this are named by their phases.
_LISTED = 3
_COLOURS = {
    "PASS": _GREEN,
    "GO": _GREEN,
    "FAIL": _RED,
    "NO-GO": _RED,
    "SKIPPED": _DIM,
}


def render_terminal(record: RunRecord, screen: Screen) -> str:
    """Return the summary; without the screen's color it holds no escape codes.

    With a location the last line points there. A brief one is the summary's end alone, for a
    reader who has watched the phases go by.
    """
    view = build_view(record)
    paint = _Painter(enabled=screen.color)
    if screen.brief:
        return _joined(_end_lines(view, paint))
    lines = [_title(view), *_phase_lines(view, paint)]
    if view.acceptance:
        lines += ["", view.required_counts, *_acceptance_lines(view, paint)]
    lines += ["", *_end_lines(view, paint)]
    if screen.location:
        lines.append(f"report  {one_line(screen.location)}/report.md")
    return _joined(lines)


def _joined(lines: list[str]) -> str:
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _end_lines(view: ReportView, paint: _Painter) -> list[str]:
    lines = [*_verdict_lines(view, paint), *_problem_lines(view, paint)]
    if view.record.verdict is Verdict.GO and view.record.exports:
        pairs = [f"{name}={shlex.quote(value)}" for name, value in view.record.exports.items()]
        lines.append(f"export {one_line(' '.join(pairs))}")
    return lines


class _Painter:
    """Wraps words in colour, or not."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled

    def __call__(self, word: str, *, width: int = 0) -> str:
        padded = word.ljust(width)
        if not self._enabled:
            return padded
        return f"\x1b[{_COLOURS.get(word, _YELLOW)}m{word}\x1b[0m{padded[len(word) :]}"

    def bold(self, word: str, text: str) -> str:
        if not self._enabled:
            return text
        return f"\x1b[{_BOLD};{_COLOURS.get(word, _YELLOW)}m{text}\x1b[0m"


def _title(view: ReportView) -> str:
    run = view.record
    count = len(view.phases)
    facts = [f"runbook {run.tool_version}", f"run {run.run_id}", f"profile {run.profile}"]
    facts.append(f"{count} phase{'' if count == 1 else 's'}")
    return "  ".join(one_line(fact) for fact in facts)


def _phase_lines(view: ReportView, paint: _Painter) -> list[str]:
    width = max((len(one_line(phase.record.name)) for phase in view.phases), default=0)
    total = len(view.phases)
    digits = len(str(total))
    facts = max((len(_phase_facts(phase)) for phase in view.phases), default=0)
    return [
        f" {phase.index:>{digits}}/{total} {one_line(phase.record.name):<{width}}  "
        f"{paint(phase.record.outcome.value, width=12)}  {_phase_facts(phase):<{facts}}  "
        f"{duration_text(phase.record.duration_s)}"
        for phase in view.phases
    ]


def _phase_facts(phase: PhaseView) -> str:
    if not phase.rows:
        return "no checks"
    return f"checks: {phase.passed}"


def _acceptance_lines(view: ReportView, paint: _Painter) -> list[str]:
    width = max(len(one_line(row.id)) for row in view.acceptance)
    return [
        f"  {paint(row.outcome, width=12)}  {one_line(row.id):<{width}}  {_receipt(row)}"
        for row in view.acceptance
    ]


def _receipt(row: CheckRow) -> str:
    if not row.path:
        return one_line(row.reason)
    parts = [f"n={row.n}", row.window, row.path]
    receipt = f"{row.value} ({', '.join(part for part in parts if part)})"
    limit = f"  {row.limit}" if row.limit else ""
    return one_line(receipt) + limit


def _verdict_lines(view: ReportView, paint: _Painter) -> list[str]:
    lines = [paint.bold(view.record.verdict.value, view.headline)]
    lines += [f"  {one_line(reason)}" for reason in view.main_reasons]
    if view.interruption:
        lines.append(f"  {view.interruption}")
    lines.append(f"  {view.counts}")
    return lines


def _problem_lines(view: ReportView, paint: _Painter) -> list[str]:
    lines: list[str] = []
    for rows in _alike(view.problems):
        row = rows[0]
        lines += _heading(rows, paint)
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


def _heading(rows: Sequence[CheckRow], paint: _Painter) -> list[str]:
    row = rows[0]
    mark = "" if row.required else " (not required)"
    if len({other.reason for other in rows}) == 1:
        return [f"{paint(row.outcome)}  {_subject(rows)}{mark}  {one_line(row.reason)}"]
    indent = " " * len(row.outcome)
    return [
        f"{indent if number else paint(row.outcome)}  {other.id}{mark}  {one_line(other.reason)}"
        for number, other in enumerate(rows)
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
