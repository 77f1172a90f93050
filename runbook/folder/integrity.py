"""Is what lies in a run's folder what the run wrote? Its files against the record and the manifest.

Nothing is judged again here, and nothing is changed: what differs is told, or raised.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from nsa.contract import sha256_of
from runbook.config.registry import report_files
from runbook.errors import RunbookError
from runbook.files import LARGEST_LOG_BYTES
from runbook.folder import EVENTS_FILE, MANIFEST_FILE, RECORD_FILE, run_folders
from runbook.folder.journal import is_going_on
from runbook.folder.manifest import (
    RUN_ID,
    changed_files,
    check_manifest,
    files_by_name,
    read_manifest,
    record_bytes,
    strange_entries,
)
from runbook.records import ArtifactRecord, RunRecord, Verdict

_MOST_LOOKED_AT = 2000


# Reports that earlier versions wrote: the manifest of such a run has their digests.
FORMER_REPORTS = ("report.json",)


def folder_problems(run_root: Path, record: RunRecord) -> list[str]:
    """Every entry in the folder against the manifest and the record."""
    problems: list[str] = []
    if (run_root / MANIFEST_FILE).is_file():
        try:
            problems += check_manifest(run_root, {a.path: a.size_bytes for a in record.artifacts})
        except RunbookError as error:
            problems.append(str(error))
    else:
        text = "missing (the run is not finished, or the file was removed)"
        problems += [f"{MANIFEST_FILE}: {text}", *strange_entries(run_root)]
    return problems + artifact_problems(run_root, record)


def artifact_problems(run_root: Path, record: RunRecord) -> list[str]:
    """Every file of the run against its digest in the record, and those that it does not list."""
    listed, files = {one.path: one for one in record.artifacts}, files_by_name(run_root)
    changed = changed_artifacts(run_root, record.artifacts)
    problems = []
    for name, artifact in listed.items():
        path = files.get(name)
        if path is None:
            problems.append(f"{name}: missing")
        elif name in changed:
            problems.append(f"{name}: differs from its digest in {RECORD_FILE}")
        elif path.stat().st_size != artifact.size_bytes:
            problems.append(f"{name}: its size differs from that in {RECORD_FILE}")
    reports = (*report_files().values(), *FORMER_REPORTS)
    known = {*listed, RECORD_FILE, EVENTS_FILE, MANIFEST_FILE, *reports}
    if listed:  # an unfinished run lists none
        problems += [
            f"{name}: not listed in {RECORD_FILE}" for name in sorted(files.keys() - known)
        ]
    return problems


def evidence_problems(run_root: Path, record: RunRecord) -> list[str]:
    """Files that a number of the record rests on, and that are others than they were then.

    One that is gone gives no number, and needs no word here.
    """
    numbers = [
        *(one for phase in record.phases for one in phase.measurements),
        *(check.measurement for check in record.checks() if check.measurement is not None),
    ]
    known = {source.path: source.sha256 for one in numbers for source in one.sources}
    return [
        f"{name}: differs from its digest in {EVENTS_FILE}"
        for name, sha256 in known.items()
        if sha256
        and (path := run_root / name).is_file()
        and (path.stat().st_size > LARGEST_LOG_BYTES or sha256_of(path) != sha256)
    ]


def changed_artifacts(run_root: Path, artifacts: Iterable[ArtifactRecord]) -> list[str]:
    """Those of which another file is there; a record may have been sent on alone."""
    listed = {one.path: one for one in artifacts}
    digests = {name: one.sha256 for name, one in listed.items()}
    sizes = {name: one.size_bytes for name, one in listed.items()}
    there = files_by_name(run_root)
    return [name for name in changed_files(run_root, digests, sizes) if name in there]


class DamagedRunError(RunbookError):
    """A run that was accepted, or may have been, and whose files are not those that it wrote."""


def earlier_runs(out: Path, left_out: dict[str, str], *, before: str = "") -> Iterator[Path]:
    """Folders that have the name of a run, newest first; `before`: those older than a run."""
    folders = [
        folder
        for folder in reversed(run_folders(out))
        if RUN_ID.fullmatch(folder.name)
        if not before or folder.name < before
    ]
    for folder in folders[:_MOST_LOOKED_AT]:
        if folder.is_symlink():
            left_out[folder.name] = "is a link, and a run lies in its own folder: move it here"
        else:
            yield folder
    if folders[_MOST_LOOKED_AT:]:
        left_out["older ones"] = f"only the newest {_MOST_LOOKED_AT} folders were looked at"


def go_record(folder: Path) -> RunRecord | None:
    """The record of a finished run that was GO; None if it was not, or has not finished.

    Raises what `run_document` does, and `RunbookError` if this version cannot read a GO's record.
    """
    document = run_document(folder)
    return valid_record(document) if is_go(document) else None


def is_go(document: object) -> bool:
    """Is this the document of a run.json that says GO?"""
    return isinstance(document, dict) and document.get("verdict") == Verdict.GO


def valid_record(document: object) -> RunRecord:
    """The record in a run.json. Raises `RunbookError` if this version cannot read it."""
    try:
        return RunRecord.model_validate(document)
    except ValueError as error:
        raise RunbookError(f"its {RECORD_FILE} is no record of this version") from error


def run_document(folder: Path) -> object:
    """What the run.json of a folder holds; None if there is none, or no JSON.

    Where it says GO the run has finished, and it is the file that the run wrote. Raises
    `DamagedRunError` if it cannot be told whether it was GO, `RunbookError` if that one goes on.
    """
    path, finished = folder / RECORD_FILE, (folder / MANIFEST_FILE).is_file()
    if not path.is_file():
        if finished:
            raise DamagedRunError(f"its {RECORD_FILE} is gone")
        return None
    document = _json(record_bytes(folder))
    was_go = is_go(document)
    if finished:
        if sha256_of(path) != _listed(folder).get(RECORD_FILE):
            raise DamagedRunError(f"{RECORD_FILE} is not the file of its {MANIFEST_FILE}")
    elif (was_go or document is None) and is_going_on(folder):
        raise RunbookError("still going on")
    elif was_go or document is None:
        raise DamagedRunError(f"it has no {MANIFEST_FILE}: removed, or cut off (--resume)")
    return document


def _json(text: bytes) -> object:
    """What the text holds; None if it is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _listed(folder: Path) -> dict[str, str]:
    try:
        return read_manifest(folder / MANIFEST_FILE)
    except RunbookError as error:
        raise DamagedRunError(str(error)) from error
    except PermissionError as error:
        raise DamagedRunError(f"its {MANIFEST_FILE} {error.strerror or error}") from error


def check_digests(folder: Path, record: RunRecord, names: Iterable[str]) -> None:
    """Raise `DamagedRunError` unless these files are those of the manifest and of the record."""
    listed, root = _listed(folder), folder.resolve()
    recorded = {artifact.path: artifact.sha256 for artifact in record.artifacts}
    for name in names:
        path = folder / name
        if not path.resolve().is_relative_to(root) or path.is_symlink():
            raise DamagedRunError(f"{name} is a link")
        if name not in listed and name not in recorded and not path.exists():
            continue
        sha256 = sha256_of(path) if path.is_file() else ""
        if sha256 != listed.get(name):
            raise DamagedRunError(f"{name} is not the file of its {MANIFEST_FILE}")
        if name not in (RECORD_FILE, EVENTS_FILE) and sha256 != recorded.get(name):
            raise DamagedRunError(f"{name} is not the file of its {RECORD_FILE}")
