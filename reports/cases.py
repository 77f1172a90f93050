"""A run for other programs: JUnit XML and CTRF, renderings of one table, and `nodes.json`.

A required check that was skipped or never reported turns no case of its own red in every reader,
so the case `verdict` does: NO-GO is a failure, INCOMPLETE an error. PARTIAL PASS is skipped: it
passed, and says nothing of the rest.

CTRF (the Common Test Report Format, https://ctrf.io) knows no error: what has no answer is `failed`
there, since a reader counts only those, and no evidence is no green. `rawStatus` has the outcome.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple
from xml.etree import ElementTree as ET

from reports.text import check_value, limit_text
from reports.view import ReportView, build_view
from runbook.errors import printable
from runbook.files import utc_seconds
from runbook.folder import RESULT_JSON
from runbook.records import Check, Confidence, Measurement, PhaseRecord, Reason, RunRecord, Verdict
from runbook.records.run import TAKES_OUT, Report, Screen


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
    beside. All texts are printable.
    """

    classname: str
    name: str
    status: Status
    code: str = ""
    message: str = ""
    text: str = ""
    output: str = ""
    facts: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Suite:
    """The cases of a phase, of checks that no phase gave, or the verdict's own."""

    name: str
    cases: Sequence[Case]
    phase: PhaseRecord | None = None

    @property
    def flaky(self) -> str:
        """The phase's launches that finished only at a second attempt."""
        return printable(", ".join(self.phase.flaky)) if self.phase else ""


def suites_of(record: RunRecord) -> list[Suite]:
    """Every check of the record and every one that it lacks, and the verdict last."""
    view = build_view(record)
    suites = [
        Suite(name=printable(phase.name), cases=[*map(_of_check, phase.checks)], phase=phase)
        for phase in view.phases
    ]
    if view.missing:
        suites.append(Suite(name="missing", cases=[*map(_of_check, view.missing)]))
    return [*suites, Suite(name="verdict", cases=[_of_verdict(view)])]


def _of_check(row: Check) -> Case:
    status = _OF_OUTCOMES.get(row.outcome, Status.ERROR)
    good = status is Status.PASSED
    return Case(
        classname=f"runbook.{printable(row.phase)}",
        name=printable(row.id),
        status=status,
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
        code=verdict.value,
        message="" if good else headline,
        text="" if good else printable("\n".join(line for line in lines if line)),
        output=headline,
        facts=_printable({"headline": view.headline, "caveats": ", ".join(view.record.caveats)}),
    )


_COUNTED = {"failures": Status.FAILURE, "errors": Status.ERROR, "skipped": Status.SKIPPED}


def render_junit(record: RunRecord, _: Screen) -> str:
    """Return JUnit XML: SKIPPED is skipped, FAIL a failure, anything else but PASS an error."""
    suites = suites_of(record)
    root = ET.Element("testsuites", name="runbook")
    for suite in suites:
        _add_suite(root, suite)
    for name in ("tests", *_COUNTED):
        root.set(name, str(sum(int(suite.get(name, "0")) for suite in root)))
    root.set("time", f"{sum(phase.duration_s for phase in record.phases):.3f}")
    ET.indent(root)
    body = ET.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{body}\n'


def _add_suite(root: ET.Element, suite: Suite) -> None:
    element = ET.SubElement(root, "testsuite", name=suite.name)
    if suite.flaky:  # where the schema of JUnit wants them
        _properties(element, (("flaky", suite.flaky),))
    for case in suite.cases:
        _add_case(element, case)
    element.set("tests", str(len(suite.cases)))
    for name, status in _COUNTED.items():
        element.set(name, str(sum(case.status is status for case in suite.cases)))
    if suite.phase:
        element.set("time", f"{suite.phase.duration_s:.3f}")
        if suite.phase.started_at:
            element.set("timestamp", printable(suite.phase.started_at))


def _add_case(suite: ET.Element, case: Case) -> None:
    element = ET.SubElement(suite, "testcase", classname=case.classname, name=case.name, time="0")
    _properties(element, case.facts)
    if case.output:
        ET.SubElement(element, "system-out").text = case.output
    if case.status is not Status.PASSED:
        bad = ET.SubElement(element, case.status, message=case.message)
        if case.status is not Status.SKIPPED:  # the schema of JUnit gives it no type
            bad.set("type", case.code)
        bad.text = case.text


def _properties(parent: ET.Element, facts: tuple[tuple[str, str], ...]) -> None:
    properties = ET.SubElement(parent, "properties")
    for name, value in facts:
        ET.SubElement(properties, "property", name=name, value=value)


JUNIT = Report(file_name="junit.xml", render=render_junit)


_SPEC_VERSION = "1.0.0"
_STATUSES = {Status.FAILURE: "failed", Status.ERROR: "failed"}


def render_ctrf(record: RunRecord, _: Screen) -> str:
    """Return the run as one CTRF document; times are milliseconds."""
    suites = suites_of(record)
    tests = [_test(suite, case) for suite in suites for case in suite.cases]
    counts = Counter(test["status"] for test in tests)
    start = utc_seconds(record.started_at)
    stop = utc_seconds(record.finished_at or "") or start
    flaky = {suite.name: suite.flaky for suite in suites if suite.flaky}
    summary = {
        "tests": len(tests),
        **{name: counts[name] for name in ("passed", "failed", "skipped", "pending", "other")},
        "suites": len(suites),
        "start": round(start * 1000),
        "stop": round(stop * 1000),
        **({"extra": {"flaky": flaky}} if flaky else {}),
    }
    tool = {"name": "runbook", "version": printable(record.tool_version)}
    results = {"tool": tool, "summary": summary, "tests": tests}
    document = {
        "reportFormat": "CTRF",
        "specVersion": _SPEC_VERSION,
        "runId": printable(record.run_id),
        "results": results,
    }
    return json.dumps(document, indent=2) + "\n"


def _test(suite: Suite, case: Case) -> dict[str, Any]:
    said = {"message": case.message, "trace": case.text, "stdout": case.output.splitlines()}
    return {
        "name": case.name,
        "status": _STATUSES.get(case.status, case.status.value),
        "rawStatus": dict(case.facts).get("outcome", case.code),
        "duration": 0,  # a check takes none; its phase does
        "suite": [suite.name],
        **{name: text for name, text in said.items() if text},
        "extra": dict(case.facts),
    }


CTRF = Report(file_name="ctrf.json", render=render_ctrf)


_SUREST_FIRST = (Confidence.CONFIRMED, Confidence.REPORTED, Confidence.SUSPECTED)


class _Word(NamedTuple):
    """What one check or launch (`source`) says of a node."""

    node: str
    source: str
    reason: str
    confidence: Confidence
    evidence: Sequence[str]
    number: Measurement | None = None


def accused_of(record: RunRecord) -> list[Mapping[str, Any]]:
    """The nodes that the record names, each once, as `nodes.json` has them, the surest first."""
    words = sorted(_words(record), key=lambda one: _SUREST_FIRST.index(one.confidence))
    said = {name: [one for one in words if one.node == name] for name in (w.node for w in words)}
    return [
        {
            "node": node,
            "reason": _told(first),
            "confidence": first.confidence,
            "evidence": list(
                dict.fromkeys(path for one in (first, *more) for path in one.evidence)
            ),
            "numbers": [
                {"name": n.name, "value": n.value, "unit": n.unit, "path": n.path}
                for n in (one.number for one in (first, *more))
                if n is not None
            ],
            "also": [_told(one) for one in more],
            "command": _command(record, first),
        }
        for node, (first, *more) in said.items()
    ]


def _words(record: RunRecord) -> Iterator[_Word]:
    for phase in record.phases:
        for check in phase.checks:
            said = (check.id, check.reason, check.confidence, check.evidence, check.measurement)
            yield from (_Word(node, *said) for node in check.nodes)
        for launch, result in ((entry.launch, entry.result) for entry in phase.launches):
            why = "; ".join(result.notes) if result.ok else result.cause
            sure = Confidence.SUSPECTED if result.ok else Confidence.REPORTED
            files = result.evidence or (f"{launch.run_dir}/{RESULT_JSON}",)
            if result.node:
                yield _Word(result.node, launch.id, why, sure, files)


def _told(word: _Word) -> str:
    return f"{word.source}: {word.reason}"


def _command(record: RunRecord, word: _Word) -> str:
    """What a person may type; empty where the run does not say how."""
    said = {"node": word.node, "reason": f"{word.source} of runbook {record.run_id}"}
    words = record.environment.get(TAKES_OUT, "")
    return re.sub(r"\{(node|reason)\}", lambda found: shlex.quote(said[found[1]]), words)


def render_nodes(record: RunRecord, _: Screen) -> str:
    """Return `nodes.json`; a run on one machine has none of them."""
    document = {
        "schema_version": 1,
        "run": record.run_id,
        "verdict": record.said,
        "reasons": list(record.reasons),
        "nodes": accused_of(record),
    }
    return json.dumps(document, indent=2) + "\n"


NODES = Report(file_name="nodes.json", render=render_nodes)
