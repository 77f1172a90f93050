"""`verify_run`: every number of a run recomputed from its artifacts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from phases.base import Phase
from runbook.engine.derive import derive_record
from runbook.engine.options import Setup, setup_of_record
from runbook.engine.run import RECORD_FILE, record_text
from runbook.errors import RunbookError
from runbook.journal import EVENTS_FILE, read_events
from runbook.manifest import MANIFEST_FILE, check_manifest, run_files
from runbook.read import file_sha256
from runbook.records import RunRecord
from runbook.verify.differences import compare_phases, differing_fields
from runbook.verify.rejudge import rejudge

__all__ = ["Verification", "verify_run"]


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
        from phases.registry import PHASES

        phases = PHASES
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
    from reports import FILE_NAMES, render

    seen, problems = [], []
    for fmt, name in FILE_NAMES.items():
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
