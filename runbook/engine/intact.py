"""Does a finished run's record follow from its journal, its profile, its plan and its launches?

Everything that needs no judging again; the files of the folder are `folder.manifest`'s. Each
function returns what differs, in words; none changes anything. `doubt` is the quick one, which
every command asks before it repeats a verdict.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nsa.contract import ENV_JSON
from nsa.contract.digests import sha256_of
from runbook.config.extends import is_file
from runbook.config.load import is_shipped, load_profile
from runbook.config.registry import Phase, report_files
from runbook.config.setup import Setup
from runbook.engine import is_as_planned, what_it_reads
from runbook.engine.derive import derive_record
from runbook.errors import RunbookError
from runbook.folder import (
    EVENTS_FILE,
    LAUNCH_JSON,
    MANIFEST_FILE,
    RECORD_FILE,
    RESULT_JSON,
    read_events,
    running_text,
)
from runbook.folder.facts import differences, read_facts, redact_variables, shown_fact
from runbook.folder.launch.documents import read_json_object
from runbook.folder.manifest import files_by_name, read_manifest, record_is_changed
from runbook.records import LaunchEntry, PhaseRecord, Reason, RunRecord, Verdict
from runbook.records.measurement import json_ready

_WITHOUT_JUDGEMENT = (Reason.INTERRUPTED, Reason.HARNESS_ERROR)
_LONGEST = 120
# Of `machine.identity`, by the names that env.json has for the same: torch is one of the packages.
_TOLD_TWICE = ("python", "packages")
# What a second attempt is started with besides the plan.
_OF_A_RETRY = "NCCL_DEBUG"


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
    old, new = (json_ready(one.model_dump(mode="json")) for one in (record, derived))
    for name in ("phases", "artifacts"):
        if old.pop(name) != new.pop(name):
            problems.append(f"{RECORD_FILE}: {name} differ from those in {EVENTS_FILE}")
    return problems + [f"{RECORD_FILE}: {text}" for text in differing_fields(old, new)]


def doubt(run_root: Path, record: RunRecord) -> str:
    """Why nothing that run.json says may be repeated, to stand after its name; empty if it may.

    A run that ended has a manifest with the digest of run.json, and a journal that gives its
    verdict. One that goes on has no manifest yet, and a record that was sent on, alone or with its
    reports, has nothing beside it.
    """
    if (run_root / MANIFEST_FILE).is_file():
        changed = f"is another file than its {MANIFEST_FILE} has"
        return changed if record_is_changed(run_root) else _contradiction(run_root, record)
    accepts = record.verdict in (Verdict.GO, Verdict.PARTIAL)
    if not (record.finished_at or accepts) or running_text(run_root):
        return ""
    if files_by_name(run_root).keys() <= {RECORD_FILE, *report_files().values()}:
        return ""
    return f"has no {MANIFEST_FILE} beside it (removed, or cut off: --resume)"


def _contradiction(run_root: Path, record: RunRecord) -> str:
    path = run_root / EVENTS_FILE
    if not path.is_file():
        gone = EVENTS_FILE in read_manifest(run_root / MANIFEST_FILE)
        return f"lies without the {EVENTS_FILE} that its {MANIFEST_FILE} lists" if gone else ""
    try:
        given = derive_record(read_events(path)[0]).verdict
    except RunbookError as error:
        return f"cannot be held against its journal ({error})"
    return "" if given is record.verdict else f"contradicts its {EVENTS_FILE}, which gives {given}"


def untrusted(record: RunRecord, why: str) -> RunRecord:
    """The record where there is a `doubt`: no verdict of it counts.

    What else it holds stays, to be looked at.
    """
    reason = f"{RECORD_FILE} {why}: nothing in it can be trusted"
    reasons = (f"{reason}; see runbook verify {record.run_id}", *record.reasons)
    fields = {"verdict": Verdict.INCOMPLETE, "reasons": reasons}
    return record.model_copy(update=fields)


def profile_problems(record: RunRecord) -> list[str]:
    """A profile that is named like a shipped one has to be that one.

    Its digest is recomputed from the document with everything else that judging determines.
    """
    asked = str(record.options.get("profile") or record.profile)
    if is_file(asked) or not is_shipped(record.profile):
        return []
    shipped = load_profile(record.profile).model_dump(mode="json")
    document = json.loads(json.dumps(record.profile_document))
    if document.get("plan"):
        document, shipped = (of_the_machine(one, shipped) for one in (document, shipped))
    found = differing_fields(document, shipped)
    return [f"profile {record.profile} is not the shipped one: {text}" for text in found]


def of_the_machine(document: Mapping[str, Any], shipped: Mapping[str, Any]) -> dict[str, Any]:
    """What of a profile no plan and no --config has a say in."""
    free = ("plan", "required", "config", "config_single", "workload")
    kept = {name: value for name, value in document.items() if name not in free}
    for name in ("phases", "limits"):
        kept[name] = {key: one for key, one in document[name].items() if key in shipped[name]}
    return kept


def planned_problems(
    record: RunRecord, run_root: Path, setup: Setup, *, phases: Mapping[str, Phase]
) -> list[str]:
    """Every launch as the phase plans it, and as its own folder says that it went."""
    problems: list[str] = []
    choices: dict[str, dict[str, str]] = {}
    for one in record.phases:
        choices[one.name] = one.choices
        phase = phases.get(one.name)
        if phase is not None and was_judged(one):
            chosen, _ = what_it_reads(phase, choices, {})
            if not is_as_planned(phase, setup.context(chosen), one):
                problems.append(f"{one.name}: the launches are not those that the phase plans")
        for entry in one.launches:
            problems += _ended_as_told(run_root, one.name, entry)
    return problems


def _ended_as_told(run_root: Path, phase: str, entry: LaunchEntry) -> list[str]:
    launch, result = entry.launch, entry.result
    folder, where = run_root / launch.run_dir, f"{phase}: launch {launch.name}"
    if not result.attempts:
        return [f"{where}: not run, but its folder is there"] if folder.exists() else []
    found: list[str] = []
    described, _ = read_json_object(folder / LAUNCH_JSON, found)
    ended, _ = read_json_object(folder / RESULT_JSON, found)
    if described is None or ended is None:
        return [f"{where}: {text}" for text in found or [f"no {LAUNCH_JSON} or {RESULT_JSON}"]]
    told = {"result": result.model_dump(mode="json"), "launch": launch.model_dump(mode="json")}
    more = {_OF_A_RETRY: "INFO"} if result.attempts > 1 else {}
    told["launch"]["env"] = redact_variables({**launch.env, **more})
    kept = {"result": ended, "launch": described.get("launch")}
    return [f"{where}: {text}" for text in differing_fields(told, kept)]


def unjudged_problems(
    record: RunRecord, run_root: Path, *, phases: Mapping[str, Phase]
) -> Iterator[str]:
    """Phases that were started and not judged, without the trace that the reason would leave."""
    for one in record.phases:
        if one.started_at and one.name not in phases:
            yield f"{one.name}: no phase of this name is installed, so it was not judged again"
        elif one.started_at and not was_judged(one):
            broke = any(run_root.glob(f"harness_error_{one.name}*.txt"))
            if not (record.interrupted or broke):
                yield f"{one.name}: not judged, and nothing shows why"


def was_judged(record: PhaseRecord) -> bool:
    """Has the phase a judgement of its own, so that it can be judged again?"""
    if not record.started_at or not record.checks:
        return False
    return not all(check.code in _WITHOUT_JUDGEMENT for check in record.checks)


def fact_problems(record: RunRecord, run_root: Path) -> Iterator[str]:
    """Facts that the record shows otherwise than facts.json, or whose file is another one."""
    for name, fact in read_facts(run_root).items():
        path = run_root / fact.path
        if fact.sha256 and (not path.is_file() or sha256_of(path) != fact.sha256):
            yield f"fact {name}: {fact.path} is not the file that it was read from"
        shown, found = record.environment.get(name, ""), shown_fact(fact)
        if shown != found:
            yield f"{RECORD_FILE}: environment.{name}: recorded {shown!r}, {found!r} found"


def software_problems(record: RunRecord, run_root: Path) -> Iterator[str]:
    """What the record says of the run's software and its launches' own env.json tells otherwise.

    Only what both tell: the harness of the run, the trainer of each launch.
    """
    for phase in record.phases:
        for entry in phase.launches:
            if entry.launch.commit:
                continue  # another commit may count otherwise
            env, _ = read_json_object(run_root / entry.launch.run_dir / ENV_JSON, [])
            versions = (env or {}).get("versions") or {}
            for name in _TOLD_TWICE:
                recorded = record.environment.get(name)
                ran = versions.get(name) if isinstance(versions, dict) else None
                # Of a digest the record has the first digits.
                if recorded and isinstance(ran, str) and ran[: len(recorded)] != recorded:
                    yield (
                        f"{RECORD_FILE}: environment.{name}: recorded {recorded!r}, "
                        f"{entry.launch.phase}/{entry.launch.name} ran on {ran[:_LONGEST]!r}"
                    )
