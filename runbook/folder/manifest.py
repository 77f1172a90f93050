"""run.json, and MANIFEST.sha256, which has a digest of each file: the one place that opens them.

The manifest is of a finished run, as `sha256sum -c` reads it. Is what lies in a run's folder what
the run wrote? Here its files are held against record and manifest, and nothing is judged again or
changed: what differs is told, or raised.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from nsa.contract.digests import sha256_of
from runbook.config.registry import report_files
from runbook.errors import RunbookError, UsageError
from runbook.files import (
    LARGEST_DOCUMENT_BYTES,
    LARGEST_LOG_BYTES,
    read_bytes,
    read_given,
    write_atomic,
)
from runbook.folder import (
    EVENTS_FILE,
    MANIFEST_FILE,
    OWN_FOLDER,
    RECORD_FILE,
    is_going_on,
    read_events,
    run_folders,
)
from runbook.records import ArtifactRecord, PhaseRecord, RunRecord, Verdict, first_problem

# Before a line of the manifest whose name is escaped.
_ESCAPED = "\\"
LINK = ": a symbolic link"


def files_by_name(run_root: Path) -> dict[str, Path]:
    """Every regular file by the name that records and manifest have for it, in a fixed order.

    That is its path below the run; a byte that is no UTF-8, as in a name that another locale
    made, stands there as `\\xff`. Links are not followed.
    """
    return {
        os.fsencode(path.relative_to(run_root)).decode("utf-8", "backslashreplace"): path
        for path in sorted(run_root.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


def artifact_records(run_root: Path, *, without: Iterable[str] = ()) -> tuple[ArtifactRecord, ...]:
    """Path, digest and size of every file, but those named in `without`."""
    left_out = {MANIFEST_FILE, *without}
    return tuple(
        ArtifactRecord(path=name, sha256=sha256_of(path), size_bytes=path.stat().st_size)
        for name, path in files_by_name(run_root).items()
        if name not in left_out
    )


def strange_entries(run_root: Path) -> list[str]:
    """Entries that no run leaves: links, empty folders, and what is neither file nor folder.

    A trainer of one's own may leave such in its own folder (`latest`, a socket). No number is read
    through them, and a listed file that became a link is missing.
    """
    problems = []
    for path in sorted(run_root.rglob("*")):
        name = path.relative_to(run_root).as_posix()
        if OWN_FOLDER in path.relative_to(run_root).parts[:-1] and not _is_real_folder(path):
            continue
        if path.is_symlink():
            problems.append(f"{name}{LINK}")
        elif path.is_dir():
            if not any(path.iterdir()):
                problems.append(f"{name}: an empty folder")
        elif not path.is_file():
            problems.append(f"{name}: neither a file nor a folder")
    return problems


def _is_real_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def write_manifest(run_root: Path) -> Path:
    """Write the digests of all files of the run; returns the manifest's path."""
    # It cannot list a folder, so one that holds nothing is not kept.
    for path in sorted(run_root.rglob("*"), reverse=True):
        if _is_real_folder(path) and not any(path.iterdir()):
            path.rmdir()
    path, lines = run_root / MANIFEST_FILE, []
    for one in artifact_records(run_root):
        # As sha256sum writes it: a name with a newline or a backslash is escaped, and marked so.
        shown = one.path.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
        lines.append(f"{'' if shown == one.path else _ESCAPED}{one.sha256}  {shown}\n")
    write_atomic(path, "".join(lines))
    return path


def read_manifest(path: Path) -> dict[str, str]:
    """The digest of each file by its name.

    Raises `RunbookError` if it is damaged or gone, `PermissionError` if this user may not read it.
    """
    try:
        text = read_bytes(path).decode("utf-8")
    except PermissionError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RunbookError(f"{path} cannot be read: {reason}") from error
    wanted, letters = {}, {"n": "\n", "r": "\r"}
    # A name may hold what else ends a line elsewhere.
    lines = text.removesuffix("\n").split("\n") if text else []
    for number, line in enumerate(lines, start=1):
        sha256, separator, name = line.removeprefix(_ESCAPED).partition("  ")
        if not separator or len(sha256) != 64 or "\0" in name:
            raise RunbookError(f"{path}: line {number} is no digest and name")
        if line.startswith(_ESCAPED):
            name = re.sub(r"\\(.)", lambda found: letters.get(found[1], found[1]), name)
        if name in wanted:
            raise RunbookError(f"{path}: line {number} names {name} again")
        wanted[name] = sha256
    return wanted


def changed_files(
    run_root: Path, artifacts: Iterable[ArtifactRecord], manifest: Mapping[str, str]
) -> dict[str, str]:
    """Each file of these artifacts and of a manifest that is not as it says, and how it differs.

    The manifest's word counts. A large file that had fewer bytes is not read.
    """
    listed, files = {one.path: one for one in artifacts}, files_by_name(run_root)
    found, wanted = {}, {name: one.sha256 for name, one in listed.items()}
    for name, sha256 in {**wanted, **manifest}.items():
        path = files.get(name)
        if path is None:
            # Unlike Path.resolve, it ends where links lead in a circle.
            inside = Path(os.path.realpath(run_root / name)).is_relative_to(run_root.resolve())
            outside = f"{MANIFEST_FILE} names a file outside the run"
            found[name] = "missing" if inside else outside
        elif (size := path.stat().st_size) > LARGEST_DOCUMENT_BYTES and not (
            name in listed and size <= listed[name].size_bytes
        ):
            # Larger than any document: no digest of it is worth the time.
            found[name] = f"changed (it has {size} bytes)"
        elif (digest := sha256_of(path)) != sha256:
            found[name] = f"changed (sha256 {digest[:12]}..., was {sha256[:12]}...)"
    return found


# Enough of a fingerprint that nobody makes another record with the same digits.
FINGERPRINT_DIGITS = 32
# The name of a run's folder: when it began, the commit, and a number within the same second.
RUN_ID = re.compile(r"(?P<time>\d{8}T\d{6}Z)-[0-9a-z]{1,40}(?:-\d{1,3})?")


def record_bytes(folder: Path) -> bytes:
    """run.json as it lies there. Raises `OSError`, also for a pipe in its place."""
    return read_given(folder / RECORD_FILE)


def load_record(folder: Path) -> RunRecord:
    """The record in run.json. Raises `RunbookError` if it is damaged or of another version."""
    path = folder / RECORD_FILE
    try:
        return RunRecord.model_validate_json(record_bytes(folder))
    except OSError as error:
        raise RunbookError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValidationError as error:
        raise UsageError(
            f"{path} is not a run record of this version: {first_problem(error)}"
            f" ({error.error_count()} problems in total)",
            hint=_way_back(folder),
        ) from error


def _way_back(folder: Path) -> str:
    """What to do about a run.json that is no record; what a whole journal gives is that record."""
    journal, ended = folder / EVENTS_FILE, (folder / MANIFEST_FILE).is_file()
    with suppress(RunbookError, OSError):
        listed = read_manifest(folder / MANIFEST_FILE) if ended else {}
        if listed.get(RECORD_FILE) == sha256_of(folder / RECORD_FILE):
            return "it is as its run ended: read it with the version that wrote it"
        if read_events(journal)[0] and (not ended or listed.get(EVENTS_FILE) == sha256_of(journal)):
            away = f"move its {MANIFEST_FILE} elsewhere, then " if ended else ""
            line = shlex.join(["runbook", "run", "--resume", str(folder)])
            return f"put it back from a copy, or {away}`{line}` writes it anew from the journal"
    return "put it back from a copy, or begin a new run"


def write_record(folder: Path, record: RunRecord) -> None:
    """Write run.json, replaced at once. Raises `OSError`."""
    write_atomic(folder / RECORD_FILE, record_text(record))


def record_text(record: RunRecord) -> str:
    """What run.json holds: one form only, so that an edit anywhere shows."""
    return record.model_dump_json(indent=2) + "\n"


def fingerprint_of(record: RunRecord) -> str:
    """SHA-256 of run.json, which has the digest of every artifact and all that was judged of them.

    Kept outside of the run's folder, it shows a forgery that is consistent within. Reports are no
    part of it: they are a rendering of run.json.
    """
    return hashlib.sha256(record_text(record).encode()).hexdigest()


def shown_fingerprint(digest: str) -> str:
    """As many digits as are printed."""
    return digest[:FINGERPRINT_DIGITS]


_MOST_LOOKED_AT = 2000


# Reports that earlier versions wrote: the manifest of such a run has their digests.
FORMER_REPORTS = ("report.json",)


def folder_problems(run_root: Path, record: RunRecord) -> list[str]:
    """Every entry in the folder against the manifest and the record."""
    path = run_root / MANIFEST_FILE
    try:
        listed = read_manifest(path)
    except RunbookError as error:
        gone = f"{MANIFEST_FILE}: missing (the run is not finished, or the file was removed)"
        problems = [str(error) if path.is_file() else gone]
        problems += artifact_problems(run_root, record, {})
    else:
        problems = artifact_problems(run_root, record, listed)
        unlisted = sorted(files_by_name(run_root).keys() - listed.keys() - {MANIFEST_FILE})
        problems += [f"{name}: not listed in {MANIFEST_FILE}" for name in unlisted]
    return problems + strange_entries(run_root)


def artifact_problems(run_root: Path, record: RunRecord, manifest: Mapping[str, str]) -> list[str]:
    """Every file of the run against its digests in manifest and record, each read once.

    And those that the record does not list.
    """
    listed, files = {one.path: one for one in record.artifacts}, files_by_name(run_root)
    found = changed_files(run_root, record.artifacts, manifest)
    problems = [f"{name}: {text}" for name, text in found.items()]
    problems += [
        f"{name}: differs from its digest in {RECORD_FILE}"
        for name, one in listed.items()
        if manifest.get(name, one.sha256) != one.sha256
    ]
    problems += [
        f"{name}: its size differs from that in {RECORD_FILE}"
        for name, path in files.items()
        if name in listed and name not in found
        if path.stat().st_size != listed[name].size_bytes
    ]
    reports = (*report_files().values(), *FORMER_REPORTS)
    known = {*listed, RECORD_FILE, EVENTS_FILE, MANIFEST_FILE, *reports}
    unlisted = sorted(files.keys() - known) if listed else []  # an unfinished run lists none
    return problems + [f"{name}: not listed in {RECORD_FILE}" for name in unlisted]


def evidence_problems(
    run_root: Path, phases: Iterable[PhaseRecord], *, cut_off: Iterable[tuple[str, str]]
) -> list[str]:
    """Files that a number of these phases rests on, and that are others than they were then.

    One that is gone gives no number, and needs no word here. Nor does one of a launch (phase,
    name) that was `cut_off`: it begins anew, and what was written since may be of that beginning.
    """
    anew = tuple(f"{phase}/{launch}/" for phase, launch in cut_off)
    numbers = (
        one
        for phase in phases
        for one in (*phase.measurements, *(check.measurement for check in phase.checks))
        if one is not None
    )
    known = {source.path: source.sha256 for one in numbers for source in one.sources}
    return [
        f"{name}: differs from its digest in {EVENTS_FILE}"
        for name, sha256 in known.items()
        if sha256
        and not name.startswith(anew)
        and (path := run_root / name).is_file()
        and (path.stat().st_size > LARGEST_LOG_BYTES or sha256_of(path) != sha256)
    ]


def changed_artifacts(run_root: Path, artifacts: Iterable[ArtifactRecord]) -> list[str]:
    """Those of which another file is there, or none; a record may have been sent on alone."""
    listed, there = list(artifacts), files_by_name(run_root)
    if not any(one.path in there for one in listed):
        return []
    found = changed_files(run_root, listed, {})
    gone = [f"{name} (missing)" for name in found if name not in there]
    return [name for name in found if name in there] + gone


class DamagedRunError(RunbookError):
    """A run that was accepted, or may have been, and whose files are not those that it wrote."""


def renamed(folder: Path, record: RunRecord) -> str:
    """That this is not the folder of its run's name, by which it is known which of two is newer."""
    same = folder.resolve().name == record.run_id
    return "" if same else f"its folder was renamed from {record.run_id}: rename it back"


def earlier_runs(out: Path, left_out: dict[str, str], *, before: str = "") -> Iterator[Path]:
    """Folders that have the name of a run, newest first; `before`: those older than a run.

    Of the others that were GO `left_out` says that they were renamed, but for a copy.
    """
    folders: list[Path] = []
    for folder in reversed(run_folders(out)):
        if RUN_ID.fullmatch(folder.name):
            folders += [folder] if not before or folder.name < before else []
            continue
        with suppress(RunbookError, OSError):
            record = go_record(folder)
            if record and not (out / record.run_id).exists():
                left_out[folder.name] = renamed(folder, record)
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
    try:
        document = json.loads(record_bytes(folder))
    except (ValueError, RecursionError):
        document = None
    was_go = is_go(document)
    if finished:
        if sha256_of(path) != _listed(folder).get(RECORD_FILE):
            raise DamagedRunError(f"{RECORD_FILE} is not the file of its {MANIFEST_FILE}")
    elif (was_go or document is None) and is_going_on(folder):
        raise RunbookError("still going on")
    elif was_go or document is None:
        raise DamagedRunError(f"it has no {MANIFEST_FILE}: removed, or cut off (--resume)")
    return document


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
