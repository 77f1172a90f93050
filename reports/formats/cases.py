"""A run as tests for continuous integration: one table, of which JUnit XML and CTRF are renderings.

A required check that was skipped or never reported turns no case of its own red in every reader,
so the case `verdict` does: NO-GO is a failure, INCOMPLETE an error. PARTIAL PASS is skipped: it
passed, and says nothing of the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from reports.text import check_value, limit_text
from reports.view import ReportView, build_view
from runbook.records import Check, Reason, RunRecord, Verdict
from runbook.text import printable


class Status(StrEnum):
    """How a case ended, in JUnit's words."""

    PASSED = "passed"
    FAILURE = "failure"
    ERROR = "error"
    SKIPPED = "skipped"


_OF_OUTCOMES = {"PASS": Status.PASSED, "FAIL": Status.FAILURE, "SKIPPED": Status.SKIPPED}
_OF_VERDICTS = {
    Verdict.GO: Status.PASSED,
    Verdict.NO_GO: Status.FAILURE,
    Verdict.PARTIAL: Status.SKIPPED,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A check, or the verdict.

    `code`, `message` and `text` are of one that did not pass, `output` of one that says something
    beside. `raw` is the outcome or verdict in the record's words. All texts are printable.
    """

    classname: str
    name: str
    status: Status
    raw: str
    code: str = ""
    message: str = ""
    text: str = ""
    output: str = ""
    facts: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Suite:
    """The cases of a phase, of checks that no phase gave, or the verdict's own.

    `duration_s` and `started_at` are those of a phase; `flaky` names its launches that finished
    only at a second attempt.
    """

    name: str
    cases: tuple[Case, ...]
    duration_s: float | None = None
    started_at: str = ""
    flaky: str = ""


def suites_of(record: RunRecord) -> list[Suite]:
    """Every check of the record and every one that it lacks, and the verdict last."""
    view = build_view(record)
    suites = [
        Suite(
            name=printable(phase.record.name),
            cases=tuple(map(_of_check, phase.rows)),
            duration_s=phase.record.duration_s,
            started_at=printable(phase.record.started_at),
            flaky=printable(", ".join(phase.record.flaky)),
        )
        for phase in view.phases
    ]
    if view.missing:
        suites.append(Suite(name="missing", cases=tuple(map(_of_check, view.missing))))
    return [*suites, Suite(name="verdict", cases=(_of_verdict(view),))]


def _of_check(row: Check) -> Case:
    status = _OF_OUTCOMES.get(row.outcome, Status.ERROR)
    good = status is Status.PASSED
    return Case(
        classname=f"runbook.{printable(row.phase)}",
        name=printable(row.id),
        status=status,
        raw=str(row.outcome),
        code=row.code,
        message="" if good else printable(f"{row.outcome} {row.code}: {row.reason}"),
        text="" if good else printable(_details(row)),
        output=printable(row.reason) if good and row.code == Reason.WARNING else "",
        facts=_facts(row),
    )


def _facts(row: Check) -> tuple[tuple[str, str], ...]:
    measured = row.measurement
    facts = {
        "outcome": row.outcome,
        "code": row.code,
        "required": "true" if row.required else "false",
        "question": row.question,
        "reason": row.reason,
        "value": check_value(row),
        "n": str(measured.n) if measured else "",
        "window": str(measured.window) if measured and measured.window else "",
        "path": measured.where if measured else "",
        "sha256": measured.sha256 if measured else "",
        "limit": limit_text(row),
        "limit_source": row.limit_source,
    }
    return _printable(facts)


def _printable(facts: dict[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple((name, printable(value)) for name, value in facts.items() if value)


def _details(row: Check) -> str:
    lines = [row.question]
    lines += [f"evidence: {path}" for path in row.evidence]
    if row.remedy:
        lines.append(f"remedy: {row.remedy}")
    if row.rerun:
        lines.append(f"rerun: {row.rerun}")
    return "\n".join(lines)


def _of_verdict(view: ReportView) -> Case:
    verdict, headline = view.record.verdict, printable(view.headline)
    status = _OF_VERDICTS.get(verdict, Status.ERROR)
    good = status is Status.PASSED
    lines = [*view.record.reasons, view.interruption, view.required_counts]
    return Case(
        classname="runbook",
        name="verdict",
        status=status,
        raw=verdict.value,
        code=verdict.value,
        message="" if good else headline,
        text="" if good else printable("\n".join(line for line in lines if line)),
        output=headline,
        facts=_printable({"headline": view.headline, "caveats": ", ".join(view.record.caveats)}),
    )
