"""A run for other programs: JUnit XML, and `nodes.json`.

A required check that was skipped or never reported turns no case of its own red in every reader,
so the case `verdict` does: NO-GO is a failure, INCOMPLETE an error. PARTIAL PASS is skipped: it
passed, and says nothing of the rest.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from xml.etree import ElementTree as ET

from reports.text import check_value, limit_text
from reports.view import ReportView, build_view
from runbook.folder import RESULT_JSON
from runbook.records import Check, Confidence, Measurement, Reason, RunRecord, Verdict
from runbook.records.run import TAKES_OUT, Report, Screen
from runbook.text import printable

# The element of a case, by the outcome of its check or the verdict: none where it passed.
_BAD = {"PASS": "", "FAIL": "failure", "SKIPPED": "skipped"}
_BAD |= {Verdict.GO: "", Verdict.NO_GO: "failure", Verdict.PARTIAL: "skipped"}
_COUNTED = {"failures": "failure", "errors": "error", "skipped": "skipped"}


def render_junit(record: RunRecord, _: Screen) -> str:
    """Return JUnit XML: SKIPPED is skipped, FAIL a failure, anything else but PASS an error."""
    view = build_view(record)
    root = ET.Element("testsuites", name="runbook")
    for phase in view.phases:
        suite = ET.SubElement(root, "testsuite", name=printable(phase.record.name))
        if phase.record.flaky:  # where the schema of JUnit wants them
            _properties(suite, {"flaky": ", ".join(phase.record.flaky)})
        _add_checks(suite, phase.rows)
        suite.set("time", f"{phase.record.duration_s:.3f}")
        if phase.record.started_at:
            suite.set("timestamp", printable(phase.record.started_at))
    if view.missing:
        _add_checks(ET.SubElement(root, "testsuite", name="missing"), view.missing)
    _add_verdict(ET.SubElement(root, "testsuite", name="verdict"), view)
    for name in ("tests", *_COUNTED):
        root.set(name, str(sum(int(suite.get(name, "0")) for suite in root)))
    root.set("time", f"{sum(phase.record.duration_s for phase in view.phases):.3f}")
    ET.indent(root)
    body = ET.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{body}\n'


def _add_checks(suite: ET.Element, rows: Iterable[Check]) -> None:
    for row in rows:
        warns = row.outcome.value == "PASS" and row.code == Reason.WARNING
        _add_case(
            suite,
            (f"runbook.{row.phase}", row.id),
            _facts(row),
            bad=_BAD.get(row.outcome, "error"),
            code=row.code,
            message=f"{row.outcome} {row.code}: {row.reason}",
            text=_details(row),
            output=row.reason if warns else "",
        )
    _count(suite)


def _add_verdict(suite: ET.Element, view: ReportView) -> None:
    verdict = view.record.verdict
    lines = [*view.record.reasons, view.interruption, view.required_counts]
    _add_case(
        suite,
        ("runbook", "verdict"),
        {"headline": view.headline, "caveats": ", ".join(view.record.caveats)},
        bad=_BAD.get(verdict, "error"),
        code=verdict.value,
        message=view.headline,
        text="\n".join(line for line in lines if line),
        output=view.headline,
    )
    _count(suite)


def _add_case(
    suite: ET.Element,
    named: tuple[str, str],
    facts: Mapping[str, str],
    *,
    bad: str,
    code: str,
    message: str,
    text: str,
    output: str,
) -> None:
    classname, name = map(printable, named)
    case = ET.SubElement(suite, "testcase", classname=classname, name=name, time="0")
    _properties(case, facts)
    if output:
        ET.SubElement(case, "system-out").text = printable(output)
    if bad:
        told = ET.SubElement(case, bad, message=printable(message))
        if bad != "skipped":  # the schema of JUnit gives it no type
            told.set("type", code)
        told.text = printable(text)


def _count(suite: ET.Element) -> None:
    cases = suite.findall("testcase")
    suite.set("tests", str(len(cases)))
    for name, bad in _COUNTED.items():
        suite.set(name, str(sum(case.find(bad) is not None for case in cases)))


def _properties(parent: ET.Element, facts: Mapping[str, str]) -> None:
    properties = ET.SubElement(parent, "properties")
    for name, value in facts.items():
        if value:
            ET.SubElement(properties, "property", name=name, value=printable(value))


def _facts(row: Check) -> dict[str, str]:
    measured = row.measurement
    return {
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


def _details(row: Check) -> str:
    lines = [row.question]
    lines += [f"evidence: {path}" for path in row.evidence]
    if row.remedy:
        lines.append(f"remedy: {row.remedy}")
    if row.rerun:
        lines.append(f"rerun: {row.rerun}")
    return "\n".join(lines)


JUNIT = Report(file_name="junit.xml", render=render_junit)


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
