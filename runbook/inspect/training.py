"""A training.csv taken apart: which runs it holds, and what its numbers can say."""

from __future__ import annotations

from pathlib import Path

from runbook.evidence import TrainingLog
from runbook.inspect.segments import parts_of, segment_of
from runbook.inspect.types import Code, Finding, RowsFacts, Segment
from runbook.inspect.values import floor_findings, value_findings
from runbook.inspect.window import window_of
from runbook.read import read_training_csv

__all__ = ["inspect_training"]

_SAID_ELSEWHERE = ("steps do not increase", "the file has no header", "the header lacks")


def inspect_training(
    path: Path, *, relative_to: Path, floor: float | None, floor_source: str
) -> tuple[RowsFacts, list[Finding]]:
    """Return what a training.csv holds, and what is suspicious about it.

    `floor` is the loss in nats that no model of this data can go below, or None.
    Raises OSError if the file cannot be read.
    """
    log = read_training_csv(path, relative_to=relative_to)
    parts = list(parts_of(log.frame))
    segments = tuple(segment_of(index, part) for index, part in enumerate(parts, start=1))
    statistics, available, findings = window_of(log, parts)
    facts = RowsFacts(
        path=log.path,
        sha256=log.sha256,
        legacy=log.legacy,
        rows=len(log.frame),
        dropped_rows=log.dropped_rows,
        segments=segments,
        statistics=tuple(statistics),
        window_steps_available=available,
    )
    findings = [
        *_file_findings(log),
        *_segment_findings(log, segments),
        *findings,
        *value_findings(log),
        *floor_findings(log, parts, floor, floor_source),
    ]
    return facts, findings


def _file_findings(log: TrainingLog) -> list[Finding]:
    """What the reader noticed; the step order has findings of its own, the old form is no fault."""
    findings = []
    for problem in log.problems:
        if problem.startswith(_SAID_ELSEWHERE):
            continue
        code = Code.TORN_ROWS if "dropped" in problem else Code.UNREADABLE
        if problem.startswith("the header occurs"):
            code = Code.MIXED_RUNS
        findings.append(Finding(code=code, message=problem, path=log.path))
    return findings


def _segment_findings(log: TrainingLog, segments: tuple[Segment, ...]) -> list[Finding]:
    if len(segments) < 2:
        return []
    first = segments[0]
    again = [one for one in segments[1:] if one.first_step <= first.first_step + first.every]
    spans = "; ".join(
        f"steps {one.first_step}-{one.last_step} ({one.rows} rows)" for one in segments[:8]
    )
    more = f"; and {len(segments) - 8} more" if len(segments) > 8 else ""
    findings = []
    if again:
        text = f"{len(again) + 1} runs in one file: {spans}{more}"
        findings.append(Finding(code=Code.MIXED_RUNS, message=text, path=log.path))
    elsewhere = len(segments) - 1 - len(again)
    if elsewhere:
        text = (
            f"steps go back or repeat at {elsewhere} places without a restart: two writers, "
            f"or a run resumed into the same file ({spans}{more})"
        )
        findings.append(Finding(code=Code.STEPS_NOT_INCREASING, message=text, path=log.path))
    return findings
