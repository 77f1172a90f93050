"""CTRF, the Common Test Report Format: the cases of `junit.xml` as JSON (https://ctrf.io).

CTRF knows no error: what has no answer is `failed` too, since a reader counts only those, and no
evidence is no green. `rawStatus` has the outcome.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from reports.formats.cases import Case, Status, Suite, suites_of
from runbook.files import utc_seconds
from runbook.records import RunRecord
from runbook.records.run import Report, Screen
from runbook.text import printable

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
        "rawStatus": case.raw,
        "duration": 0,  # a check takes none; its phase does
        "suite": [suite.name],
        **{name: text for name, text in said.items() if text},
        "extra": dict(case.facts),
    }


REPORT = Report(file_name="ctrf.json", render=render_ctrf)
