"""run.json from the journal: a pure function of the events, however many there are so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from runbook.engine.verdict import missing_phases, reasons_for
from runbook.errors import RunbookError
from runbook.journal import Event
from runbook.records import PhaseRecord, RunRecord, judge_run

__all__ = ["derive_record", "phase_records"]


def phase_records(events: Sequence[Event]) -> dict[str, PhaseRecord]:
    """The latest record of every phase that was judged, in the order of their first judgement."""
    records: dict[str, PhaseRecord] = {}
    for event in events:
        if event["event"] == "phase_finished":
            record = PhaseRecord.model_validate(event["record"])
            records[record.name] = record
    return records


def derive_record(events: Sequence[Event]) -> RunRecord:
    """The record of a run from its journal, finished or not.

    Required checks without a row become rows of phases that were not run. Raises `RunbookError`
    if the journal does not begin with the start of a run.
    """
    if not events or events[0]["event"] != "run_started":
        raise RunbookError("the journal does not begin with the start of a run")
    skeleton = RunRecord.model_validate(events[0]["record"])
    asked_for, known = events[0]["phases"], _known(events[0]["known"])
    last = events[-1] if events[-1]["event"] in ("run_finished", "run_interrupted") else {}
    interrupted = str(last.get("signal", ""))
    phases = list(phase_records(events).values())
    phases += missing_phases(
        phases,
        skeleton.required,
        known=known,
        asked_for=asked_for,
        interrupted=interrupted,
        profile=skeleton.profile,
    )
    phases.sort(key=lambda phase: list(known).index(phase.name) if phase.name in known else 99)
    checks = tuple(check for phase in phases for check in phase.checks)
    exports = dict(skeleton.exports)
    for phase in phases:
        exports |= phase.choices
    changes: dict[str, Any] = {
        "phases": tuple(phases),
        "verdict": judge_run(checks, skeleton.required),
        "reasons": reasons_for(checks, skeleton.required, interrupted=interrupted),
        "environment": _environment(skeleton, events),
        "exports": {name: value for name, value in exports.items() if value},
        "interrupted": bool(interrupted),
        "finished_at": last.get("ts"),
        "artifacts": last.get("artifacts", ()),
        "options": skeleton.options | ({"signal": interrupted} if interrupted else {}),
    }
    fields = skeleton.model_dump()
    return RunRecord.model_validate(fields | changes)


def _known(rows: Sequence[Sequence[str]]) -> dict[str, tuple[str, str]]:
    return {name: (title, source) for name, title, source in rows}


def _environment(skeleton: RunRecord, events: Sequence[Event]) -> Mapping[str, str]:
    found = dict(skeleton.environment)
    for event in events:
        if event["event"] == "facts":
            found |= event["environment"]
    return found
