"""`report.json`: the verdict, the rows and the problems for a program that reads no more."""

from __future__ import annotations

import json
from typing import Any

from reports.causes import Cause
from reports.view import CheckRow, ReportView, build_view
from runbook.records import RunRecord
from runbook.records.measurement import json_ready
from runbook.records.run import Report, Screen

REPORT_SCHEMA_VERSION = 1


def render_json(record: RunRecord, _: Screen) -> str:
    """Return the summary as JSON in ASCII; `run.json` remains the full record."""
    document = json_ready(_document(build_view(record)))
    return json.dumps(document, indent=2, ensure_ascii=True, allow_nan=False) + "\n"


def _document(view: ReportView) -> dict[str, Any]:
    record = view.record.model_dump(mode="json")
    head = ("tool_version", "run_id", "profile", "scope", "caveats", "verdict")
    how = ("reasons", "interrupted", "started_at", "finished_at", "command")
    return {
        "schema_version": REPORT_SCHEMA_VERSION,
        **{name: record[name] for name in head},
        "headline": view.headline,
        "exit_code": view.record.verdict.exit_code,
        **{name: record[name] for name in how},
        "counts": view.counts,
        "required_counts": view.required_counts,
        **{name: record[name] for name in ("environment", "settings", "exports")},
        "phases": [
            {name: phase[name] for name in ("name", "title", "outcome", "duration_s")}
            | {"checks": [_row(row) for row in shown.rows]}
            | {name: phase[name] for name in ("tables", "choices", "notes")}
            for phase, shown in zip(record["phases"], view.phases, strict=True)
        ],
        "acceptance": [_row(row) for row in view.acceptance],
        "problems": [row.id for row in view.problems],
        "causes": [_cause(cause) for cause in view.causes],
        "left_out": list(view.left_out),
        "artifacts": record["artifacts"],
    }


def _cause(cause: Cause) -> dict[str, Any]:
    names = ("title", "outcome", "code", "blocks", "launches", "evidence", "remedy", "rerun")
    return {name: getattr(cause, name) for name in names} | {"rows": [row.id for row in cause.rows]}


def _row(row: CheckRow) -> dict[str, Any]:
    check = row.check.model_dump(mode="json") if row.check else {}
    head = ("id", "outcome", "code", "required", "question", "reason")
    return {
        **{name: getattr(row, name) for name in head},
        "measurement": check.get("measurement"),
        "comparator": check.get("comparator", ""),
        "limit": check.get("limit"),
        **{name: getattr(row, name) for name in ("limit_source", "evidence", "remedy", "rerun")},
    }


REPORT = Report(file_name="report.json", render=render_json)
