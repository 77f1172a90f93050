"""An inspection as text for a reader."""

from __future__ import annotations

from runbook.inspect.types import Inspection, RankFacts, RowsFacts, RunDirectory, Statistic

__all__ = ["inspection_text"]


def inspection_text(inspection: Inspection) -> str:
    """What was found, what it measures, and what is suspicious about it."""
    lines: list[str] = []
    for one in inspection.directories:
        lines += [*_directory(inspection.path, one), ""]
    suspicious = [finding for finding in inspection.findings if finding.suspicious]
    undecided = [finding for finding in inspection.findings if not finding.suspicious]
    for title, findings in (("suspicious", suspicious), ("too little to say", undecided)):
        if findings:
            width = max(len(finding.code) for finding in findings)
            lines.append(title)
            lines += [f"  {one.code:<{width}}  {one.path}: {one.message}" for one in findings]
    lines.append(_conclusion(len(suspicious), len(undecided)))
    return "\n".join(lines)


def _conclusion(suspicious: int, undecided: int) -> str:
    if suspicious:
        things = "thing" if suspicious == 1 else "things"
        return f"{suspicious} suspicious {things}: do not quote a number of this without it"
    if undecided:
        return "nothing suspicious, but too little evidence for the runbook's statistic"
    return "nothing suspicious"


def _directory(root: str, one: RunDirectory) -> list[str]:
    lines = [root if one.path == "." else f"{root.rstrip('/')}/{one.path}"]
    if one.training:
        lines += _rows(one.training)
    lines += [f"  {_rank(facts)}" for facts in one.ranks]
    return lines


def _rows(facts: RowsFacts) -> list[str]:
    form = "no header, step,loss,lr,toks_per_s" if facts.legacy else "with header"
    name = facts.path.rpartition("/")[2]
    runs = f"{len(facts.segments)} run{'' if len(facts.segments) == 1 else 's'}"
    dropped = f", {facts.dropped_rows} dropped" if facts.dropped_rows else ""
    lines = [f"  {name}  {form}; {facts.rows} rows{dropped}, {runs}; sha256 {facts.sha256[:12]}"]
    for one in facts.segments[:12]:
        every = f", one per {one.every} steps" if one.every > 1 else ""
        arms = f", arms {', '.join(one.arms)}" if one.arms else ""
        lines.append(
            f"    run {one.index}  steps {one.first_step}-{one.last_step}  {one.rows} rows{every}"
            f", {one.warmup_rows} of them warm-up{arms}"
        )
    if len(facts.segments) > 12:
        lines.append(f"    and {len(facts.segments) - 12} more")
    lines += [f"    {_statistic(one)}" for one in facts.statistics]
    lines.append(
        f"    usable rows in the last 50 steps of the last run: {facts.window_steps_available}"
    )
    return lines


def _statistic(one: Statistic) -> str:
    spread = f" +- {_number(one.stdev)}" if one.stdev is not None else ""
    runs = f" of {one.runs} runs" if one.runs > 1 else ""
    note = f"; {one.note}" if one.note else ""
    return (
        f"{one.name}  {_number(one.value)}{spread} {one.unit} "
        f"(n={one.n}, steps {one.first_step}-{one.last_step}{runs}{note})"
    )


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def _rank(facts: RankFacts) -> str:
    steps = f"steps {facts.first_step}-{facts.last_step}" if facts.last_step is not None else ""
    silence = (
        f"longest silence {facts.longest_silence_s:.3g} s"
        if facts.longest_silence_s is not None
        else ""
    )
    code = f"exit code {facts.exit_code}" if facts.exit_code is not None else ""
    ended = f"last line {facts.last_event!r}" if facts.last_event else ""
    name = facts.path.rpartition("/")[2]
    parts = [f"{facts.lines} lines", steps, silence, ended, code]
    return f"{name}  {', '.join(part for part in parts if part)}"
