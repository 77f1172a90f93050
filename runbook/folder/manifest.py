"""run.json, and MANIFEST.sha256, which has a digest of each file: the one place that opens them.

The manifest is of a finished run, as `sha256sum -c` reads it.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from pydantic import ValidationError

from nsa.contract import sha256_of
from runbook.errors import RunbookError
from runbook.files import LARGEST_DOCUMENT_BYTES, read_bytes, read_given, write_atomic
from runbook.folder import MANIFEST_FILE, OWN_FOLDER, RECORD_FILE
from runbook.records import ArtifactRecord, RunRecord, first_problem

# Before a line of the manifest whose name is escaped.
_ESCAPED = "\\"
LINK = ": a symbolic link"


def run_files(run_root: Path) -> Iterator[Path]:
    """Every regular file below the folder in a fixed order; links are not followed."""
    for path in sorted(run_root.rglob("*")):
        if path.is_file() and not path.is_symlink():
            yield path


def files_by_name(run_root: Path) -> dict[str, Path]:
    """Every regular file by the name that records and manifest have for it.

    That is its path below the run; a byte that is no UTF-8, as in a name that another locale
    made, stands there as `\\xff`.
    """
    return {
        os.fsencode(path.relative_to(run_root)).decode("utf-8", "backslashreplace"): path
        for path in run_files(run_root)
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


def check_manifest(run_root: Path, sizes: Mapping[str, int] | None = None) -> list[str]:
    """What differs from the manifest: changed, missing and unlisted entries, each named.

    A large file that had fewer bytes by `sizes` is not read. Raises `RunbookError` if there is
    no manifest or it cannot be read.
    """
    wanted = read_manifest(run_root / MANIFEST_FILE)
    problems = [f"{name}: {text}" for name, text in changed_files(run_root, wanted, sizes).items()]
    unlisted = sorted(files_by_name(run_root).keys() - wanted.keys() - {MANIFEST_FILE})
    problems += [f"{name}: not listed in {MANIFEST_FILE}" for name in unlisted]
    return problems + strange_entries(run_root)


def record_is_changed(run_root: Path) -> bool:
    """Is run.json another file than the one that its manifest lists?"""
    try:
        listed = read_manifest(run_root / MANIFEST_FILE)
    except RunbookError:
        return True
    return listed.get(RECORD_FILE) != sha256_of(run_root / RECORD_FILE)


def changed_files(
    run_root: Path, wanted: Mapping[str, str], sizes: Mapping[str, int] | None = None
) -> dict[str, str]:
    """Each file of a manifest with these digests that is not as it says, and how it differs."""
    found, files = {}, files_by_name(run_root)
    for name, sha256 in wanted.items():
        path = files.get(name)
        if path is None:
            # Unlike Path.resolve, it ends where links lead in a circle.
            inside = Path(os.path.realpath(run_root / name)).is_relative_to(run_root.resolve())
            outside = f"{MANIFEST_FILE} names a file outside the run"
            found[name] = "missing" if inside else outside
        elif sizes and path.stat().st_size > max(sizes.get(name, 0), LARGEST_DOCUMENT_BYTES):
            # Larger than any document: no digest of it is worth the time.
            found[name] = f"changed (it has {path.stat().st_size} bytes)"
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
        raise RunbookError(
            f"{path} is not a run record of this version: {first_problem(error)}"
            f" ({error.error_count()} problems in total)"
        ) from error


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
