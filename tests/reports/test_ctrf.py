"""`ctrf.json` is the form that https://ctrf.io describes, and is green where the run is."""

from __future__ import annotations

import json
from collections import Counter
from datetime import UTC, datetime
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from jsonschema import Draft7Validator

from runbook.engine.derive import render
from runbook.records import Outcome, Verdict
from tests.reports.samples import SAMPLES, go
from tests.reports.test_reports import record_of

_WHOLE = {"type": "integer", "minimum": 0}
_TEXT = {"type": "string", "minLength": 1}
_STATUS = ("passed", "failed", "skipped", "pending", "other")


def _exactly(needed: dict[str, Any], **may: Any) -> dict[str, Any]:
    known = {"type": "object", "additionalProperties": False, "properties": {**needed, **may}}
    return {**known, "required": list(needed)}


# What the format demands, and of what it allows the names that a run has.
FORM = _exactly(
    {
        "reportFormat": {"const": "CTRF"},
        "specVersion": {"type": "string", "pattern": r"^[0-9]+\.[0-9]+\.[0-9]+$"},
        "results": _exactly(
            {
                "tool": _exactly({"name": _TEXT}, version={"type": "string"}),
                "summary": _exactly(
                    dict.fromkeys(("tests", *_STATUS, "start", "stop"), _WHOLE),
                    suites=_WHOLE,
                    extra={"type": "object"},
                ),
                "tests": {
                    "type": "array",
                    "items": _exactly(
                        {"name": _TEXT, "status": {"enum": list(_STATUS)}, "duration": _WHOLE},
                        suite={"type": "array", "minItems": 1, "items": {"type": "string"}},
                        stdout={"type": "array", "items": {"type": "string"}},
                        extra={"type": "object"},
                        message=_TEXT,
                        trace=_TEXT,
                        rawStatus=_TEXT,
                    ),
                },
            }
        ),
    },
    runId=_TEXT,
)


@pytest.mark.parametrize("name", SAMPLES)
def test_it_has_the_form_and_says_what_junit_says(name: str) -> None:
    record = SAMPLES[name]()
    document = json.loads(render(record, "ctrf"))
    Draft7Validator(FORM).validate(document)
    tests, summary = document["results"]["tests"], document["results"]["summary"]
    assert {**dict.fromkeys(_STATUS, 0), **Counter(test["status"] for test in tests)} == {
        status: summary[status] for status in _STATUS
    }
    cases = ET.fromstring(render(record, "junit")).findall(".//testcase")
    assert [test["name"] for test in tests] == [case.get("name") for case in cases]
    red = [case.get("name") for case in cases if {one.tag for one in case} & {"failure", "error"}]
    assert [test["name"] for test in tests if test["status"] == "failed"] == red
    began = datetime.fromisoformat(record.started_at).astimezone(UTC).timestamp()
    assert summary["start"] == began * 1000 <= summary["stop"]


TAGS = {Outcome.PASS: "", Outcome.FAIL: "failure", Outcome.SKIPPED: "skipped"}


@pytest.mark.parametrize("outcome", Outcome)
def test_only_a_pass_passes_and_no_answer_is_red(outcome: Outcome) -> None:
    record = record_of({"a.b": outcome}, set())
    check, verdict = json.loads(render(record, "ctrf"))["results"]["tests"]
    wanted = {Outcome.PASS: "passed", Outcome.SKIPPED: "skipped"}.get(outcome, "failed")
    assert (check["status"], check["rawStatus"]) == (wanted, outcome.value)
    green = record.verdict is Verdict.GO
    assert (verdict["name"], verdict["status"] == "passed") == ("verdict", green)
    (case,) = ET.fromstring(render(record, "junit")).findall(".//testcase[@name='a.b']")
    assert "".join(one.tag for one in case if one.tag != "properties") == TAGS.get(outcome, "error")


def test_a_run_that_did_not_end_and_a_time_that_is_none_have_a_document() -> None:
    for start, end in (("2026-01-31T12:00:00Z", None), ("yesterday", "today")):
        record = go().model_copy(update={"started_at": start, "finished_at": end})
        summary = json.loads(render(record, "ctrf"))["results"]["summary"]
        assert summary["start"] == summary["stop"]
