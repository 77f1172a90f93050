"""run.json from the journal: a pure function of the events, however many there are so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from runbook.engine.verdict import missing_phases, reasons_for
from runbook.errors import RunbookError
from runbook.journal import Event
from runbook.records import ArtifactRecord, PhaseRecord, RunRecord, judge_run

__all__ = ["assemble", "derive_record", "phase_records"]


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
    last = events[-1] if events[-1]["event"] in ("run_finished", "run_interrupted") else {}
    interrupted = str(last.get("signal", ""))
    changed = skeleton.model_copy(
        update={
            "environment": _environment(skeleton, events),
            "interrupted": bool(interrupted),
            "finished_at": last.get("ts"),
            "artifacts": tuple(ArtifactRecord(**fields) for fields in last.get("artifacts", ())),
            "options": skeleton.options | ({"signal": interrupted} if interrupted else {}),
        }
    )
    return assemble(
        changed,
        list(phase_records(events).values()),
        asked_for=events[0]["phases"],
        known=_known(events[0]["known"]),
    )


def assemble(
    record: RunRecord,
    phases: Sequence[PhaseRecord],
    *,
    asked_for: Sequence[str],
    known: Mapping[str, tuple[str, str]],
) -> RunRecord:
    """The record with these judged phases, and all that follows from them.

    Required checks that no phase gave become rows; verdict, reasons and exports are worked out.
    `record.exports` are those before any phase chose something.
    """
    signal = str(record.options.get("signal") or "")
    missing = missing_phases(
        phases,
        record.required,
        known=known,
        asked_for=asked_for,
        interrupted=signal,
        profile=record.profile,
    )
    order = list(known)
    whole = sorted(
        [*phases, *missing],
        key=lambda phase: order.index(phase.name) if phase.name in known else len(order),
    )
    checks = tuple(check for phase in whole for check in phase.checks)
    exports = dict(record.exports)
    for phase in whole:
        exports |= phase.choices
    return record.model_copy(
        update={
            "phases": tuple(whole),
            "verdict": judge_run(checks, record.required),
            "reasons": reasons_for(checks, record.required, interrupted=signal),
            "exports": {name: value for name, value in exports.items() if value},
        }
    )


def _known(rows: Sequence[Sequence[str]]) -> dict[str, tuple[str, str]]:
    return {name: (title, source) for name, title, source in rows}


def _environment(skeleton: RunRecord, events: Sequence[Event]) -> Mapping[str, str]:
    found = dict(skeleton.environment)
    for event in events:
        if event["event"] == "facts":
            found |= event["environment"]
    return found
