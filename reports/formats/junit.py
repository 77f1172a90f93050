"""JUnit XML for continuous integration: one case per check, and one for the verdict."""

from __future__ import annotations

from xml.etree import ElementTree as ET

from reports.formats.cases import Case, Status, Suite, suites_of
from runbook.records import RunRecord
from runbook.records.run import Report, Screen

_COUNTED = {"failures": Status.FAILURE, "errors": Status.ERROR, "skipped": Status.SKIPPED}


def render_junit(record: RunRecord, _: Screen) -> str:
    """Return JUnit XML: SKIPPED is skipped, FAIL a failure, anything else but PASS an error."""
    suites = suites_of(record)
    root = ET.Element("testsuites", name="runbook")
    for suite in suites:
        _add_suite(root, suite)
    for name in ("tests", *_COUNTED):
        root.set(name, str(sum(int(suite.get(name, "0")) for suite in root)))
    root.set("time", f"{sum(suite.duration_s or 0.0 for suite in suites):.3f}")
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
    if suite.duration_s is not None:
        element.set("time", f"{suite.duration_s:.3f}")
        if suite.started_at:
            element.set("timestamp", suite.started_at)


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


REPORT = Report(file_name="junit.xml", render=render_junit)
