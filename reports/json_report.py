"""`report.json`: the verdict, the rows and the problems for a program that reads no more."""

from __future__ import annotations

import json
import math
from typing import Any

from reports.view import CheckRow, ReportView, build_view
from runbook.records import RunRecord
from runbook.records.report import Report, Screen

REPORT_SCHEMA_VERSION = 1


def render_json(record: RunRecord, _: Screen) -> str:
    """Return the summary as JSON in ASCII; `run.json` remains the full record."""
    document = _finite(_document(build_view(record)))
    return json.dumps(document, indent=2, ensure_ascii=True, allow_nan=False) + "\n"


def _document(view: ReportView) -> dict[str, Any]:
    record = view.record
    return {
        "schema_version": REPORT_SCHEMA_VERSION,
        "tool_version": record.tool_version,
        "run_id": record.run_id,
        "profile": record.profile,
        "scope": record.scope,
        "verdict": record.verdict.value,
        "exit_code": record.verdict.exit_code,
        "reasons": list(record.reasons),
        "interrupted": record.interrupted,
        "started_at": record.started_at,
        "finished_at": record.finished_at,
        "command": record.command,
        "counts": view.counts,
        "required_counts": view.required_counts,
        "environment": record.environment,
        "settings": record.settings,
        "exports": record.exports,
        "phases": [
            {
                "name": phase.record.name,
                "title": phase.record.title,
                "outcome": phase.record.outcome.value,
                "duration_s": phase.record.duration_s,
                "checks": [_row(row) for row in phase.rows],
                "tables": [table.model_dump(mode="json") for table in phase.record.tables],
                "choices": phase.record.choices,
                "notes": list(phase.record.notes),
            }
            for phase in view.phases
        ],
        "acceptance": [_row(row) for row in view.acceptance],
        "problems": [row.id for row in view.problems],
        "artifacts": [file.model_dump(mode="json") for file in record.artifacts],
    }


def _finite(value: Any) -> Any:
    """The same document with NaN and infinities as words: JSON has no numbers for them."""
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _row(row: CheckRow) -> dict[str, Any]:
    check = row.check
    dumped = check.model_dump(mode="json") if check else {}
    return {
        "id": row.id,
        "outcome": row.outcome,
        "code": row.code,
        "required": row.required,
        "question": row.question,
        "reason": row.reason,
        "measurement": dumped.get("measurement"),
        "comparator": dumped.get("comparator", ""),
        "limit": dumped.get("limit"),
        "limit_source": row.limit_source,
        "evidence": list(row.evidence),
        "remedy": row.remedy,
        "rerun": row.rerun,
    }


REPORT = Report(file_name="report.json", render=render_json)
