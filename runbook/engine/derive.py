"""run.json from the journal: a pure function of the events, however many there are so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from runbook.engine.judge import missing_phases, reasons_for
from runbook.engine.scope import caveats_of, scope_of
from runbook.errors import RunbookError
from runbook.folder.journal import Event, as_it_writes
from runbook.folder.names import ENDS
from runbook.records import ArtifactRecord, PhaseRecord, RunRecord, judge_run
from runbook.records.run import Invocation, Repeated


@as_it_writes()
def phase_records(events: Sequence[Event]) -> dict[str, PhaseRecord]:
    """The latest record of every phase that was judged, in the order of their first judgement.

    One that is to be run again has none until it was, and then says how it ended before.
    """
    records: dict[str, PhaseRecord] = {}
    before: dict[str, list[Repeated]] = {}
    for event in events:
        if event["event"] == "phase_repeated":
            records.pop(event["phase"], None)
            earlier = Repeated.model_validate(event["repeated"])
            before.setdefault(event["phase"], []).append(earlier)
        elif event["event"] == "phase_finished":
            record = PhaseRecord.model_validate(event["record"])
            repeated = tuple(before.get(record.name, ()))
            records[record.name] = record.model_copy(update={"repeated": repeated})
    return records


@as_it_writes()
def derive_record(events: Sequence[Event]) -> RunRecord:
    """The record of a run from its journal, finished or not.

    Required checks without a row become rows of phases that were not run. Raises `RunbookError`
    if the journal does not begin with the start of a run.
    """
    if not events or events[0]["event"] != "run_started":
        raise RunbookError("the journal does not begin with the start of a run")
    skeleton = RunRecord.model_validate(events[0]["record"])
    extended = [event for event in events if event["event"] == "run_extended"]
    asked = extended[-1] if extended else {}
    last = events[-1] if events[-1]["event"] in ENDS else {}
    interrupted = str(last.get("signal", ""))
    changed = skeleton.model_copy(
        update={
            "environment": _environment(skeleton, events),
            "interrupted": bool(interrupted),
            "finished_at": last.get("ts"),
            "artifacts": tuple(ArtifactRecord(**fields) for fields in last.get("artifacts", ())),
            "options": skeleton.options
            | ({"phases": asked["option"]} if asked else {})
            | ({"signal": interrupted} if interrupted else {})
            | ({"cut_off": begun} if (begun := _begun_again(events)) else {}),
            "required": tuple(asked.get("required", skeleton.required)),
            "command": "; ".join([skeleton.command, *(event["command"] for event in extended)]),
        }
    )
    return assemble(
        changed,
        list(phase_records(events).values()),
        asked_for=asked.get("phases", events[0]["phases"]),
        known={name: (title, source) for name, title, source in events[0]["known"]},
    )


def _begun_again(events: Sequence[Event]) -> str:
    """`baseline/run1 begun 3 times` for each launch that was cut off and started again.

    Who watches a run can stop a slow launch, and go on until one is fast: that must be seen.
    """
    begun: dict[tuple[str, str], int] = {}
    for event in events:
        if event["event"] == "phase_repeated":  # told by itself
            begun = {key: times for key, times in begun.items() if key[0] != event["phase"]}
        elif event["event"] == "launch_started":
            key = (event["phase"], event["launch"])
            begun[key] = begun.get(key, 0) + 1
    again = [(f"{phase}/{name}", times) for (phase, name), times in begun.items() if times > 1]
    return ", ".join(f"{name} begun {times} times" for name, times in again)


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
        invocation=Invocation.recorded(record.profile, record.settings, record.options),
    )
    order = list(known)
    whole = sorted(
        [*phases, *missing],
        key=lambda phase: order.index(phase.name) if phase.name in known else len(order),
    )
    checks = tuple(check for phase in whole for check in phase.checks)
    exports, sources = dict(record.exports), dict(record.sources)
    for phase in whole:
        # What a person gave has the last word in a launch, and so here.
        chosen = {k: v for k, v in phase.choices.items() if k not in record.settings}
        exports |= chosen
        sources |= dict.fromkeys(chosen, f"phase {phase.name}")
    return record.model_copy(
        update={
            "phases": tuple(whole),
            "scope": scope_of(record, whole),
            "caveats": caveats_of(record, whole),
            "verdict": judge_run(checks, record.required),
            "reasons": reasons_for(checks, record.required, interrupted=signal),
            "exports": {name: value for name, value in exports.items() if value},
            "sources": sources,
        }
    )


def _environment(skeleton: RunRecord, events: Sequence[Event]) -> Mapping[str, str]:
    """What was known from the start, the facts as last collected, and the load beside phases."""
    facts = [event["environment"] for event in events if event["event"] == "facts"]
    loads = [event["environment"] for event in events if event["event"] == "load"]
    known = {**skeleton.environment, **(facts[-1] if facts else {})}
    return {**known, **{name: text for load in loads for name, text in load.items()}}
