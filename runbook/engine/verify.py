"""`verify_run`: every number of a run recomputed from its artifacts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runbook import registry
from runbook.engine.journal import EVENTS_FILE, derive_record, read_events
from runbook.engine.options import Setup, setup_of_record
from runbook.engine.outputs import (
    MANIFEST_FILE,
    RECORD_FILE,
    check_manifest,
    record_text,
    render,
    report_files,
    run_files,
)
from runbook.engine.rejudge import rejudge
from runbook.errors import RunbookError
from runbook.read import file_sha256
from runbook.records import PhaseRecord, RunRecord
from runbook.records.phase import Phase

_LONGEST = 120
# Lists of a phase: the field, what one entry is called, and what names it.
_LISTS = (
    ("checks", "check", "id"),
    ("measurements", "measurement", "name"),
    ("tables", "table", "title"),
    ("series", "series", "name"),
)


def compare_phases(recorded: PhaseRecord, recomputed: PhaseRecord) -> list[str]:
    """One line for everything in `recorded` that the artifacts do not give."""
    problems: list[str] = []
    old, new = recorded.model_dump(mode="json"), recomputed.model_dump(mode="json")
    for field, kind, key in _LISTS:
        problems += _rows(recorded.name, kind, old.pop(field), new.pop(field), key)
    problems += [f"{recorded.name}.{text}" for text in differing_fields(old, new)]
    return problems


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


def differing_fields(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """`field: recorded X, recomputed Y` for every leaf that differs."""
    problems = []
    for name in sorted(old.keys() | new.keys()):
        one, other = old.get(name), new.get(name)
        if json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True):
            continue
        if isinstance(one, dict) and isinstance(other, dict):
            problems += differing_fields(one, other, f"{prefix}{name}.")
        else:
            problems.append(f"{prefix}{name}: recorded {_short(one)}, recomputed {_short(other)}")
    return problems


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What was compared, and every difference that was found."""

    run_id: str
    files: int
    checks: int
    measurements: int
    reports: tuple[str, ...]
    differences: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """True if nothing differs."""
        return not self.differences


def verify_run(
    run_root: Path, *, phases: Mapping[str, Phase] | None = None, setup: Setup | None = None
) -> Verification:
    """Recompute a run from its artifacts and compare.

    The manifest against the files, the artifact digests in run.json, run.json against the journal,
    every check, measurement and table against a fresh reading and judgement, and every report
    against a fresh rendering. `phases` and `setup` replace the registered ones.
    Raises `RunbookError` if there is no readable run.json.
    """
    record, differences = _load(run_root)
    differences += _manifest(run_root)
    differences += _artifacts(run_root, record)
    differences += _journal(run_root, record)
    if phases is None:
        phases = registry.phases()
    try:
        for old, new in rejudge(record, run_root, setup or setup_of_record(record), phases=phases):
            differences += compare_phases(old, new)
    except ValueError as error:  # a run.json or facts.json that was edited into nonsense
        differences.append(f"cannot be judged again: {error}")
    reports, found = _reports(run_root, record)
    return Verification(
        run_id=record.run_id,
        files=sum(1 for _ in run_files(run_root)),
        checks=len(record.checks()),
        measurements=sum(len(phase.measurements) for phase in record.phases),
        reports=reports,
        differences=tuple(dict.fromkeys([*differences, *found])),
    )


def _load(run_root: Path) -> tuple[RunRecord, list[str]]:
    path = run_root / RECORD_FILE
    try:
        text = path.read_bytes().decode("utf-8")
        record = RunRecord.model_validate_json(text)
    except (OSError, ValueError) as error:
        raise RunbookError(f"{path} cannot be read: {error}") from error
    if record_text(record) != text:
        return record, [f"{RECORD_FILE}: not as the runbook wrote it"]
    return record, []


def _manifest(run_root: Path) -> list[str]:
    if not (run_root / MANIFEST_FILE).is_file():
        return [f"{MANIFEST_FILE}: missing (the run is not finished, or the file was removed)"]
    try:
        return check_manifest(run_root)
    except RunbookError as error:
        return [str(error)]


def _artifacts(run_root: Path, record: RunRecord) -> list[str]:
    problems = []
    for artifact in record.artifacts:
        path = run_root / artifact.path
        if not path.is_file():
            problems.append(f"{artifact.path}: missing")
        elif file_sha256(path) != artifact.sha256:
            problems.append(f"{artifact.path}: differs from its digest in {RECORD_FILE}")
    return problems


def _journal(run_root: Path, record: RunRecord) -> list[str]:
    path = run_root / EVENTS_FILE
    try:
        events, whole = read_events(path)
        derived = derive_record(events)
    except (RunbookError, ValueError, KeyError, TypeError) as error:
        return [f"{EVENTS_FILE}: {error}"]
    problems = [f"{EVENTS_FILE}: torn last line"] if whole != path.stat().st_size else []
    old, new = record.model_dump(mode="json"), derived.model_dump(mode="json")
    for name in ("phases", "artifacts"):
        if old.pop(name) != new.pop(name):
            problems.append(f"{RECORD_FILE}: {name} differ from those in {EVENTS_FILE}")
    return problems + [f"{RECORD_FILE}: {text}" for text in differing_fields(old, new)]


def _reports(run_root: Path, record: RunRecord) -> tuple[tuple[str, ...], list[str]]:
    seen, problems = [], []
    for fmt, name in report_files().items():
        path = run_root / name
        if not path.is_file():
            continue
        seen.append(name)
        # Bytes, not text: newline translation would hide an edited line end.
        found = path.read_bytes().decode("utf-8", "replace").split("\n")
        wanted = render(record, fmt).split("\n")
        if found != wanted:
            line = next(
                (n for n, (a, b) in enumerate(zip(found, wanted, strict=False), 1) if a != b),
                min(len(found), len(wanted)),
            )
            problems.append(f"{name}: line {line} is not what {RECORD_FILE} gives")
    return tuple(seen), problems
