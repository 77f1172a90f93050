"""A finished run judged again from its artifacts, without starting anything.

Under its own limits it has to give every number that was recorded (`verify_run`); under other
limits it gets another record (`judged`).
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from nsa.contract import ENV_JSON
from nsa.contract.digests import sha256_of
from runbook.config.load import is_shipped, load_profile
from runbook.config.registry import report_files
from runbook.config.setup import Setup, setup_of_record
from runbook.engine import RunInFolder, is_as_planned, was_judged
from runbook.engine.derive import assemble, differing_fields, journal_problems, known_phases, render
from runbook.files import is_file, read_bytes
from runbook.folder import LAUNCH_JSON, RECORD_FILE, RESULT_JSON, manifest
from runbook.folder.facts import read_facts, redact_variables, shown_fact
from runbook.folder.launch.documents import read_json_object
from runbook.folder.manifest import folder_problems
from runbook.machine.identity import CODE, code_digest
from runbook.records import LaunchEntry, Outcome, PhaseRecord, RunRecord

# Lists of a phase: the field, what one entry is called, and what names it.
_LISTS = (
    ("checks", "check", "id"),
    ("measurements", "measurement", "name"),
    ("tables", "table", "title"),
    ("series", "series", "name"),
)


# What a phase shows beside its checks and numbers.
_SHOWN = ("tables", "series", "comparisons")

# NumPy and BLAS choose their code by the processor, and logarithms, exponentials and products of it
# end in other digits: 4e-16 of a number was seen. A difference of two such numbers is off by more.
_ROUNDING, _ROUNDING_OF_NOTHING = 1e-9, 1e-12


def compare_phases(recorded: PhaseRecord, recomputed: PhaseRecord) -> list[str]:
    """One line for everything in `recorded` that the artifacts do not give."""
    problems: list[str] = []
    old, new = recorded.model_dump(mode="json"), recomputed.model_dump(mode="json")
    new = _but_for_rounding(old, new)
    for field, kind, key in _LISTS:
        problems += _rows(recorded.name, kind, old.pop(field), new.pop(field), key)
    problems += [f"{recorded.name}.{text}" for text in differing_fields(old, new)]
    return problems


def _compare_records(recorded: RunRecord, again: RunRecord) -> list[str]:
    """One line for everything in the record that judging its artifacts does not give."""
    names, given = ([phase.name for phase in one.phases] for one in (recorded, again))
    problems = [] if names == given else [f"phases: recorded {names}, judged again {given}"]
    nothing = {} if _by_this_code(recorded) else dict.fromkeys(_SHOWN, ())
    for pair in zip(recorded.phases, again.phases, strict=False):
        old, new = (phase.model_copy(update=nothing) for phase in pair)
        problems += compare_phases(old, new) if old.name == new.name else []
    old_rest, new_rest = (
        one.model_dump(mode="json", exclude={"phases"}) for one in (recorded, again)
    )
    return problems + [f"{RECORD_FILE}: {text}" for text in differing_fields(old_rest, new_rest)]


def _but_for_rounding(old: Any, new: Any) -> Any:
    """What was recomputed, with the recorded digits where another processor may give others."""
    if isinstance(old, float) and isinstance(new, float):
        same = math.isclose(old, new, rel_tol=_ROUNDING, abs_tol=_ROUNDING_OF_NOTHING)
        return old if same else new
    if isinstance(old, dict) and isinstance(new, dict):
        return {key: _but_for_rounding(old.get(key), value) for key, value in new.items()}
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return list(map(_but_for_rounding, old, new))
    return new


def _rows(
    phase: str, kind: str, old: list[dict[str, Any]], new: list[dict[str, Any]], key: str
) -> Iterator[str]:
    names = [row[key] for row in old]
    if names != [row[key] for row in new]:
        theirs = {row[key] for row in new}
        extra = [name for name in names if name not in theirs]
        absent = [row[key] for row in new if row[key] not in names]
        yield (
            f"{phase}: {kind}s differ: recorded but not in the artifacts {extra}, "
            f"in the artifacts but not recorded {absent}"
        )
        return
    for one, other in zip(old, new, strict=True):
        where = one[key] if kind == "check" else f"{phase}: {kind} {one[key]!r}"
        for text in differing_fields(one, other):
            yield f"{where}: {text}"


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What was compared, every difference that was found, and what is no evidence but odd."""

    run_id: str
    fingerprint: str
    files: int
    checks: int
    measurements: int
    reports: tuple[str, ...]
    differences: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True if nothing differs."""
        return not self.differences


def verify_run(run_root: Path, *, fingerprint: str = "") -> Verification:
    """Recompute a run from its artifacts and compare.

    Every entry in the folder against run.json and the manifest, run.json against the
    journal, the profile's digest, the plan and the end of every launch, every fact that is shown,
    the software as each launch tells it, everything that judging determines (checks, numbers,
    tables, scope, verdict) against a fresh reading and judgement, and every report against a fresh
    rendering. A report, a table or a curve that other code wrote need not be what this code would
    write: its digest holds it, and a report has to say what the record says. `fingerprint` is what
    was kept elsewhere of the one that run.json should have, from its first digit on. The notes tell
    of such reports, and of a folder that was copied or renamed.

    Raises `RunbookError` if there is no readable run.json.
    """
    record, differences = manifest.load_record(run_root), list[str]()
    if manifest.record_text(record).encode() != manifest.record_bytes(run_root):
        differences.append(f"{RECORD_FILE}: not as the runbook wrote it")
    digest = sha256_of(run_root / RECORD_FILE)
    if not digest.startswith(fingerprint.lower()):
        is_one, asked = map(manifest.shown_fingerprint, (digest, fingerprint))
        text = "that is another run, this one before it went on, or the record was changed since"
        differences.append(f"{RECORD_FILE}: fingerprint {is_one}, asked for {asked}: {text}")
    differences += folder_problems(run_root, record)
    differences += journal_problems(run_root, record)
    try:
        setup = setup_of_record(record)
        differences += profile_problems(record)
        differences += _compare_records(record, judged(record, run_root, setup))
        differences += phase_problems(record, run_root, setup)
        differences += fact_problems(record, run_root)
        differences += software_problems(record, run_root)
    except ValueError as error:  # a run.json or facts.json that was edited into nonsense
        differences.append(f"cannot be judged again: {error}")
    except OSError as error:
        what = f"{error.filename}: {error.strerror or error}"
        differences.append(f"cannot be judged again: {what}")
    reports, found, notes = _reports(run_root, record)
    notes += filter(None, [manifest.renamed(run_root, record)])
    return Verification(
        run_id=record.run_id,
        fingerprint=digest,
        files=len(manifest.files_by_name(run_root)),
        checks=len(record.checks()),
        measurements=sum(len(phase.measurements) for phase in record.phases)
        + sum(check.measurement is not None for check in record.checks()),
        reports=reports,
        differences=tuple(dict.fromkeys([*differences, *found])),
        notes=tuple(notes),
    )


def _reports(run_root: Path, record: RunRecord) -> tuple[tuple[str, ...], list[str], list[str]]:
    """The reports that are there, what is wrong with them, and what is only another version's."""
    seen, problems, others = list[str](), list[str](), list[str]()
    for fmt, name in report_files().items():
        path = run_root / name
        if not path.is_file():
            continue
        seen.append(name)
        # Bytes, not text: newline translation would hide an edited line end.
        try:
            found = read_bytes(path).decode("utf-8", "replace").split("\n")
        except OSError as error:
            problems.append(f"{name}: {error.strerror}")
            continue
        wanted = render(record, fmt).split("\n")
        if found == wanted:
            continue
        # Does it have the verdict in these words? As text, whatever the format escapes.
        says = record.said in html.unescape("\n".join(found)).replace("\\", "")
        if _by_this_code(record) or not says:
            pairs = enumerate(zip_longest(found, wanted), start=1)
            line = next(number for number, (one, other) in pairs if one != other)
            problems.append(f"{name}: line {line} is not what {RECORD_FILE} gives")
        else:
            others.append(name)
    told = f"{', '.join(others)}: written by other code than this, and held by digest"
    return tuple(seen), problems, [told] if others else []


def _by_this_code(record: RunRecord) -> bool:
    """As far as the record tells: an old one does not."""
    return record.environment.get(CODE) in (None, code_digest())


def _phases_again(record: RunRecord, run_root: Path, setup: Setup) -> Iterator[PhaseRecord]:
    """Every phase that ran, as it is judged now.

    A phase that never ran, was cut off before its judgement, or in which the runbook itself
    failed has nothing to judge again: whatever its record says, it is INCOMPLETE. Raises
    `ValueError` for facts that cannot be read, `OSError` for an unreadable disk.
    """
    run = RunInFolder(setup=setup, run_root=run_root, facts=read_facts(run_root))
    for old in (phase for phase in record.phases if phase.started_at):
        phase = setup.phases_by_name.get(old.name)
        if phase is None or not was_judged(old):
            yield _unjudged(old)
            continue
        new = run.judged_again(phase, old)
        if not any(phase.name in later.reads for later in setup.phases):
            del run.evidence[phase.name]  # nobody needs it any more, and it is large
        run.choices[old.name] = new.choices
        yield new


def _unjudged(old: PhaseRecord) -> PhaseRecord:
    """The record without anything that only a judgement could give."""
    nothing = {"outcome": Outcome.INCOMPLETE, "measurement": None}
    checks = tuple(check.model_copy(update=nothing) for check in old.checks)
    lists = ("measurements", "tables", "series", "comparisons", "notes")
    empty: dict[str, object] = dict.fromkeys(lists, ())
    empty |= {"choices": {}, "remedies": {}, "first_commands": {}}
    return old.model_copy(update={"outcome": Outcome.INCOMPLETE, "checks": checks, **empty})


def judged(record: RunRecord, run_root: Path, setup: Setup) -> RunRecord:
    """The record as it follows from the artifacts and this setup alone; nothing is written.

    Launches, facts and settings stay what they were: a profile that would have planned other
    launches gets rows without evidence, never numbers of another plan. Raises `ValueError` and
    `OSError` as the readers do.
    """
    changed = record.model_copy(
        update={
            "profile": setup.profile.name,
            "profile_sha256": setup.profile_sha256(),
            "profile_document": setup.profile_document(),
            "required": setup.required,
            "exports": setup.exports,
            "sources": setup.sources,
            "options": {**record.options, "profile": setup.options.invocation().profile},
        }
    )
    return assemble(
        changed,
        list(_phases_again(record, run_root, setup)),
        asked_for=list(setup.phases_by_name),
        known=known_phases(setup),
    )


# Of `machine.identity`, by the names that env.json has for the same: torch is one of the packages.
_TOLD_TWICE = ("python", "packages")
# What a second attempt is started with besides the plan.
_OF_A_RETRY = "NCCL_DEBUG"
_LONGEST = 120


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


def phase_problems(record: RunRecord, run_root: Path, setup: Setup) -> list[str]:
    """Every launch as the phase plans it, and as its own folder says that it went.

    And phases that were started and not judged, without the trace that the reason would leave.
    """
    problems: list[str] = []
    choices = {one.name: one.choices for one in record.phases}
    planned = RunInFolder(setup=setup, run_root=run_root, choices=choices)
    for one in record.phases:
        phase = setup.phases_by_name.get(one.name)
        if phase is None and one.started_at:
            problems.append(f"{one.name}: this phase was not asked for, so it was not judged again")
        elif phase is not None and was_judged(one):
            if not is_as_planned(phase, planned.context(phase), one):
                problems.append(f"{one.name}: the launches are not those that the phase plans")
        elif one.started_at and not (record.interrupted or _broke(run_root, one.name)):
            problems.append(f"{one.name}: not judged, and nothing shows why")
        for entry in one.launches:
            problems += _ended_as_told(run_root, one.name, entry)
    return problems


def _broke(run_root: Path, phase: str) -> bool:
    """Did the runbook itself fail in this phase?"""
    return any(run_root.glob(f"harness_error_{phase}*.txt"))


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
    for launch in (entry.launch for entry in record.launches()):
        if launch.commit:
            continue  # another commit may count otherwise
        env, _ = read_json_object(run_root / launch.run_dir / ENV_JSON, [])
        versions = (env or {}).get("versions") or {}
        for name in _TOLD_TWICE:
            recorded = record.environment.get(name)
            ran = versions.get(name) if isinstance(versions, dict) else None
            # Of a digest the record has the first digits.
            if recorded and isinstance(ran, str) and ran[: len(recorded)] != recorded:
                yield (
                    f"{RECORD_FILE}: environment.{name}: recorded {recorded!r}, "
                    f"{launch.id} ran on {ran[:_LONGEST]!r}"
                )
