"""run.json from the journal, and what follows from it: its reports, and what a full disk refused.

The record is a pure function of the events, however many there are so far. Does a record follow
from its journal? `doubt` is the quick look, which every command asks before it repeats a verdict.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nsa.contract.digests import sha256_of
from runbook.config import registry
from runbook.config.setup import Setup
from runbook.engine import missing_phases, reasons_for
from runbook.engine.scope import caveats_of, scope_of
from runbook.errors import RunbookError
from runbook.files import read_given, write_atomic
from runbook.folder import (
    ENDS,
    EVENTS_FILE,
    MANIFEST_FILE,
    RECORD_FILE,
    Event,
    as_it_writes,
    read_events,
    running_text,
)
from runbook.folder.facts import differences
from runbook.folder.manifest import files_by_name, read_manifest
from runbook.records import THE_RUN, ArtifactRecord, PhaseRecord, RunRecord, Verdict, judge_run
from runbook.records.run import Repeated, Screen


@dataclass(frozen=True, kw_only=True)
class SoFar:
    """What a journal tells of its phases and launches.

    `records` are the latest of every phase that was judged, in the order of their first judgement;
    one that is to be run again has none until it was, and then says how it ended before. `whole`
    names those that ran to their end, `judged_at` has the number of the event in which each was
    judged last. `begun` counts the starts of a launch, and `ended` has its last result; both begin
    anew with a phase that is run again, but for the launches of it that are kept.
    """

    records: dict[str, PhaseRecord] = field(default_factory=dict)
    whole: set[str] = field(default_factory=set)
    judged_at: dict[str, int] = field(default_factory=dict)
    begun: dict[tuple[str, str], int] = field(default_factory=dict)
    ended: dict[tuple[str, str], Mapping[str, Any]] = field(default_factory=dict)

    @property
    def finished(self) -> dict[str, PhaseRecord]:
        """Records of the phases that ran to their end; an interrupted one is not among them."""
        return {name: record for name, record in self.records.items() if name in self.whole}

    @property
    def begun_again(self) -> str:
        """`baseline/run1 begun 3 times` for each launch that was cut off and started again.

        Who watches a run can stop a slow launch, and go on until one is fast: that must be seen.
        """
        again = [(key, times) for key, times in self.begun.items() if times > 1]
        return ", ".join(f"{'/'.join(key)} begun {times} times" for key, times in again)


@as_it_writes()
def so_far(events: Sequence[Event]) -> SoFar:
    """The journal, read once from its beginning."""
    told = SoFar()
    before: dict[str, list[Repeated]] = {}
    for event in events:
        if event["event"] == "phase_repeated":
            name, kept = event["phase"], event.get("kept", ())
            told.records.pop(name, None)
            told.whole.discard(name)
            before.setdefault(name, []).append(Repeated.model_validate(event["repeated"]))
            for key in [key for key in {**told.begun, **told.ended} if key[0] == name]:
                told.begun.pop(key, None)  # told by itself
                if key[1] not in kept:
                    told.ended.pop(key, None)
        elif event["event"] == "phase_finished":
            record = PhaseRecord.model_validate(event["record"])
            repeated = tuple(before.get(record.name, ()))
            told.records[record.name] = record.model_copy(update={"repeated": repeated})
            told.judged_at[record.name] = event["seq"]
            if not event["interrupted"]:
                told.whole.add(record.name)
        elif event["event"] in ("launch_started", "launch_finished"):
            key = (event["phase"], event["launch"])
            if event["event"] == "launch_started":
                told.begun[key] = told.begun.get(key, 0) + 1
            else:
                told.ended[key] = event["result"]
    return told


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
    interrupted, told = str(last.get("signal", "")), so_far(events)
    changed = skeleton.model_copy(
        update={
            "environment": _environment(skeleton, events),
            "interrupted": bool(interrupted),
            "finished_at": last.get("ts"),
            "artifacts": tuple(ArtifactRecord(**fields) for fields in last.get("artifacts", ())),
            "options": skeleton.options
            | ({"phases": asked["option"]} if asked else {})
            | ({"signal": interrupted} if interrupted else {})
            | ({"cut_off": told.begun_again} if told.begun_again else {}),
            "required": tuple(asked.get("required", skeleton.required)),
            "command": "; ".join([skeleton.command, *(event["command"] for event in extended)]),
        }
    )
    return assemble(
        changed,
        list(told.records.values()),
        asked_for=asked.get("phases", events[0]["phases"]),
        known={name: (title, source) for name, title, source in events[0]["known"]},
    )


def known_phases(setup: Setup) -> dict[str, tuple[str, str]]:
    """Title and source of each phase that is known where this is run, in running order."""
    known = {**registry.phases_of(setup.profile.phases), **setup.phases_by_name}
    return {name: (phase.title, phase.source) for name, phase in known.items()}


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
    signal, order = str(record.options.get("signal") or ""), list(known)
    missing = missing_phases(record, phases, known=known, asked_for=asked_for)
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


def render(record: RunRecord, name: str, screen: Screen | None = None) -> str:
    """The record in one of the formats, a function of the record alone."""
    return registry.reports()[name].text(record, screen)


def write_reports(record: RunRecord, run_root: Path) -> None:
    """Write every report into the run's folder, each replaced at once.

    Everything is rendered before the first file changes.
    """
    files = registry.report_files()
    texts = {run_root / file: render(record, name) for name, file in files.items()}
    for path, text in texts.items():
        write_atomic(path, text)


REMEDY = (
    "make room for the run's files first (`df -h`, `df -i` and `quota` show what is left, "
    "`ulimit -f unlimited` takes a limit of their size away; the folder has to be writable), then "
    "continue the run with --resume, or start it anew with another --out"
)
# How the reason begins, by which a screen knows it.
NOT_WRITTEN = "the run's files cannot be written"


def refused(record: RunRecord, what: str) -> RunRecord:
    """The record as far as it came, never GO; what it has not come to says what to do first.

    `what`: file and error, in words.
    """
    fields = {
        "phases": tuple(_remedied(phase) for phase in record.phases),
        "verdict": Verdict.NO_GO if record.verdict is Verdict.NO_GO else Verdict.INCOMPLETE,
        "reasons": (f"{NOT_WRITTEN} ({what})", *record.reasons[:1]),
    }
    return record.model_copy(update=fields)


def _remedied(phase: PhaseRecord) -> PhaseRecord:
    checks = tuple(
        check.model_copy(update={"remedy": REMEDY}) if check.follows == THE_RUN else check
        for check in phase.checks
    )
    return phase.model_copy(update={"checks": checks})


_LONGEST = 120


def differing_fields(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """`field: recorded X, recomputed Y` for every leaf that differs."""
    return [
        f"{key}: recorded {_short(one)}, recomputed {_short(other)}"
        for key, one, other in differences(old, new)
    ]


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def journal_problems(run_root: Path, record: RunRecord) -> list[str]:
    """The record against the one that its journal gives."""
    path = run_root / EVENTS_FILE
    try:
        events, whole = read_events(path)
        derived = derive_record(events)
    except (RunbookError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"{EVENTS_FILE}: {error}"]
    problems = [f"{EVENTS_FILE}: torn last line"] if whole != path.stat().st_size else []
    # As words: no NaN equals itself, and a check that could not be computed may have one.
    old, new = (json.loads(one.model_dump_json()) for one in (record, derived))
    for name in ("phases", "artifacts"):
        if old.pop(name) != new.pop(name):
            problems.append(f"{RECORD_FILE}: {name} differ from those in {EVENTS_FILE}")
    return problems + [f"{RECORD_FILE}: {text}" for text in differing_fields(old, new)]


def doubt(run_root: Path, record: RunRecord) -> str:
    """Why nothing that run.json says may be repeated, to stand after its name; empty if it may.

    A run that ended has a manifest with the digests of run.json and of the journal, which gave its
    verdict then; what came after that end is no doubt. One that goes on has no manifest yet, and a
    record that was sent on, alone or with its reports, has nothing beside it.
    """
    if (run_root / MANIFEST_FILE).is_file():
        try:
            listed = read_manifest(run_root / MANIFEST_FILE)
        except RunbookError:
            listed = {}
        if listed.get(RECORD_FILE) != sha256_of(run_root / RECORD_FILE):
            return f"is another file than its {MANIFEST_FILE} has"
        return _contradiction(run_root, record, listed.get(EVENTS_FILE))
    accepts = record.verdict in (Verdict.GO, Verdict.PARTIAL)
    if not (record.finished_at or accepts) or running_text(run_root):
        return ""
    if files_by_name(run_root).keys() <= {RECORD_FILE, *registry.report_files().values()}:
        return ""
    return f"has no {MANIFEST_FILE} beside it (removed, or cut off: --resume)"


def _contradiction(run_root: Path, record: RunRecord, listed: str | None) -> str:
    """What the journal, whose digest in the manifest is `listed`, has against the record."""
    path = run_root / EVENTS_FILE
    if not path.is_file():
        return f"lies without the {EVENTS_FILE} that its {MANIFEST_FILE} lists" if listed else ""
    try:
        events = read_events(path)[0]
        ends = [event["seq"] for event in events if event.get("event") in ENDS]
        ended = events[: ends[-1]] if ends else events
        given = derive_record(ended).verdict
    except RunbookError as error:
        return f"cannot be held against its journal ({error})"
    lines = read_given(path).splitlines(keepends=True)[: len(ended)]
    # Of a journal that was cut, what is left may give the same verdict.
    if listed and listed != hashlib.sha256(b"".join(lines)).hexdigest():
        return f"lies beside another {EVENTS_FILE} than its {MANIFEST_FILE} has"
    return "" if given is record.verdict else f"contradicts its {EVENTS_FILE}, which gives {given}"


def untrusted(record: RunRecord, why: str) -> RunRecord:
    """The record where there is a `doubt`: no verdict of it counts.

    What else it holds stays, to be looked at.
    """
    reason = f"{RECORD_FILE} {why}: nothing in it can be trusted"
    reasons = (f"{reason}; see runbook verify {record.run_id}", *record.reasons)
    return record.model_copy(update={"verdict": Verdict.INCOMPLETE, "reasons": reasons})
