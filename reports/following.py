"""What to type after a run: one answer for every page, the terminal and `runbook` alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from reports.advice import without
from reports.causes import Cause
from reports.permits import permit_of
from runbook.engine.extend import after_an_accident
from runbook.records import Outcome, RunRecord, Verdict
from runbook.records.run import Step

# What a line with the first of them begins with, and one with the second.
STEPS = ("next", "then")


def following(record: RunRecord, causes: Sequence[Cause]) -> tuple[Step, ...]:
    """The next command, and the one after it; none where nothing is left to type.

    A run that was cut off goes on first. Of a run that is not GO, the command of its first cause,
    then what leads to a verdict once that passes.
    """
    invocation = record.invocation
    if record.interrupted or record.finished_at is None:
        resume = invocation.resume_line(record.run_id)
        return (Step(command=resume, does="go on where it was cut off"),)
    if record.verdict is Verdict.GO:
        command = permit_of(record).command
        return (Step(command=command, does="train behind this GO, by a plan"),) if command else ()
    if record.verdict is Verdict.PARTIAL:
        missing = list(dict.fromkeys(name.partition(".")[0] for name in record.left_out()))
        add = invocation.resume_line(record.run_id, missing)
        return (Step(command=add, does="add what was not asked for"),) if missing else ()
    return tuple(_blocked(record, causes))


def _blocked(record: RunRecord, causes: Sequence[Cause]) -> Iterator[Step]:
    first = next((cause for cause in causes if cause.blocks), None)
    if first is None:
        return
    advice, invocation = first.advice, record.invocation
    when = "once your trainer is fixed" if advice.shipped else "when this passes"
    if advice.command:
        yield Step(command=advice.command, does=f"for {first.lead.id}")
    else:
        when = ""
    line, does = invocation.line(), "run all phases: a GO needs every required check"
    if advice.left_out:
        line = without(line, advice.left_out)
    elif record.options.get("plan"):
        if after_an_accident(record):
            line, does = invocation.resume_line(record.run_id), "go on with this launch"
    elif record.verdict is Verdict.INCOMPLETE and not advice.shipped and _worth_keeping(record):
        line, does = invocation.failed_line(record.run_id), "run again here what did not pass"
    yield Step(command=line, when=when, does=does)


def _worth_keeping(record: RunRecord) -> bool:
    """Has a phase trained and passed? A machine that preflight refused may be another one then."""
    return any(phase.ran and phase.outcome is Outcome.PASS for phase in record.phases)
