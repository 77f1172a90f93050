"""JUnit XML for continuous integration: one case per check, and one for the verdict."""

from __future__ import annotations

from xml.etree import ElementTree as ET

from reports.text import check_value, limit_text
from reports.view import PhaseView, ReportView, build_view
from runbook.records import Check, Reason, RunRecord, Verdict
from runbook.records.run import Report, Screen
from runbook.text import printable

_TAGS = {"PASS": "", "SKIPPED": "skipped", "FAIL": "failure"}


def render_junit(record: RunRecord, _: Screen) -> str:
    """Return JUnit XML: SKIPPED is skipped, FAIL a failure, anything else but PASS an error.

    A required check that was skipped or never reported turns no case of its own red in every
    reader, so the case `verdict` does: NO-GO is a failure, INCOMPLETE an error. PARTIAL PASS is
    skipped: it passed, and says nothing of the rest.
    """
    view = build_view(record)
    root = ET.Element("testsuites", name="runbook")
    for phase in view.phases:
        _add_suite(root, phase.record.name, phase.rows, phase)
    if view.missing:
        _add_suite(root, "missing", view.missing, None)
    _add_verdict(root, view)
    for name in ("tests", "failures", "errors", "skipped"):
        root.set(name, str(sum(int(suite.get(name, "0")) for suite in root)))
    root.set("time", f"{sum(phase.record.duration_s for phase in view.phases):.3f}")
    ET.indent(root)
    body = ET.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{body}\n'


def _add_suite(
    root: ET.Element, name: str, rows: tuple[Check, ...], phase: PhaseView | None
) -> None:
    suite = ET.SubElement(root, "testsuite", name=printable(name))
    for row in rows:
        _add_case(suite, row)
    _count(suite)
    if phase and phase.record.flaky:
        properties = ET.Element("properties")
        suite.insert(0, properties)  # where the schema of JUnit wants them
        flaky = printable(", ".join(phase.record.flaky))
        ET.SubElement(properties, "property", name="flaky", value=flaky)
    if phase:
        suite.set("time", f"{phase.record.duration_s:.3f}")
        if phase.record.started_at:
            suite.set("timestamp", printable(phase.record.started_at))


def _count(suite: ET.Element) -> None:
    suite.set("tests", str(len(suite.findall("testcase"))))
    for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(name, str(len(suite.findall(f"testcase/{tag}"))))


def _add_case(suite: ET.Element, row: Check) -> None:
    case = ET.SubElement(
        suite,
        "testcase",
        classname=f"runbook.{printable(row.phase)}",
        name=printable(row.id),
        time="0",
    )
    properties = ET.SubElement(case, "properties")
    for name, value in _facts(row):
        ET.SubElement(properties, "property", name=name, value=printable(value))
    tag = _TAGS.get(row.outcome, "error")
    if not tag:
        if row.code == Reason.WARNING:
            ET.SubElement(case, "system-out").text = printable(row.reason)
        return
    message = printable(f"{row.outcome} {row.code}: {row.reason}")
    verdict = ET.SubElement(case, tag, message=message)
    if tag != "skipped":
        verdict.set("type", row.code)
    verdict.text = printable(_details(row))


def _facts(row: Check) -> list[tuple[str, str]]:
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
    return [(name, value) for name, value in facts.items() if value]


def _details(row: Check) -> str:
    lines = [row.question]
    lines += [f"evidence: {path}" for path in row.evidence]
    if row.remedy:
        lines.append(f"remedy: {row.remedy}")
    if row.rerun:
        lines.append(f"rerun: {row.rerun}")
    return "\n".join(lines)


def _add_verdict(root: ET.Element, view: ReportView) -> None:
    suite = ET.SubElement(root, "testsuite", name="verdict")
    case = ET.SubElement(suite, "testcase", classname="runbook", name="verdict", time="0")
    verdict = view.record.verdict
    properties = ET.SubElement(case, "properties")
    for name, value in (("headline", view.headline), ("caveats", ", ".join(view.record.caveats))):
        if value:
            ET.SubElement(properties, "property", name=name, value=printable(value))
    ET.SubElement(case, "system-out").text = printable(view.headline)
    if verdict is not Verdict.GO:
        tag = {Verdict.NO_GO: "failure", Verdict.PARTIAL: "skipped"}.get(verdict, "error")
        bad = ET.SubElement(case, tag, message=printable(view.headline))
        if tag != "skipped":  # the schema of JUnit gives it no type
            bad.set("type", verdict.value)
        lines = [*view.record.reasons, view.interruption, view.required_counts]
        bad.text = printable("\n".join(line for line in lines if line))
    _count(suite)


REPORT = Report(file_name="junit.xml", render=render_junit)
