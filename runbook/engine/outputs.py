"""Files that follow from a run's record: run.json itself, the reports, and the manifest.

`MANIFEST.sha256` has a digest of every file of a finished run, as `sha256sum -c` reads it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from runbook import registry
from runbook.errors import RunbookError, UsageError, did_you_mean
from runbook.files import write_atomic
from runbook.read.documents import file_sha256
from runbook.records import ArtifactRecord, RunRecord
from runbook.records.run import Screen

RECORD_FILE = "run.json"
MANIFEST_FILE = "MANIFEST.sha256"
# The name of a run's folder: when it began, the commit, and a number within the same second.
RUN_ID = re.compile(r"(?P<time>\d{8}T\d{6}Z)-[0-9a-z]{1,40}(?:-\d{1,3})?")


def record_text(record: RunRecord) -> str:
    """run.json as it is written: one form only, so that an edit anywhere shows."""
    return record.model_dump_json(indent=2) + "\n"


def format_problems(names: Iterable[str]) -> list[str]:
    """One sentence for each name that is no report format."""
    known = registry.report_names()
    return [
        f"{name!r}: no such format{did_you_mean(name, known)}; there are: {', '.join(known)}"
        for name in names
        if name not in known
    ]


def render(record: RunRecord, name: str, screen: Screen | None = None) -> str:
    """The record in one format, a function of the record alone. Raises UsageError."""
    if problems := format_problems([name]):
        raise UsageError(problems)
    return registry.reports()[name].text(record, screen)


def report_files() -> dict[str, str]:
    """The file that a run keeps of each format, by the format's name."""
    return {name: report.file_name for name, report in registry.reports().items()}


def write_reports(record: RunRecord, run_root: Path, names: Iterable[str]) -> list[Path]:
    """Write the reports into the run's folder, each replaced at once, and return their paths.

    Everything is rendered before the first file changes. Raises UsageError for unknown formats.
    """
    wanted = list(dict.fromkeys(names))
    if problems := format_problems(wanted):
        raise UsageError(problems)
    files = report_files()
    texts = {run_root / files[name]: render(record, name) for name in wanted}
    for path, text in texts.items():
        write_atomic(path, text)
    return list(texts)


def run_files(run_root: Path) -> Iterator[Path]:
    """Every regular file below the folder in a fixed order; links are not followed."""
    for path in sorted(run_root.rglob("*")):
        if path.is_file() and not path.is_symlink():
            yield path


def artifact_records(run_root: Path, *, without: Iterable[str] = ()) -> tuple[ArtifactRecord, ...]:
    """Path, digest and size of every file, but those named in `without`."""
    left_out = {MANIFEST_FILE, *without}
    records = []
    for path in run_files(run_root):
        name = path.relative_to(run_root).as_posix()
        if name not in left_out:
            records.append(
                ArtifactRecord(path=name, sha256=file_sha256(path), size_bytes=path.stat().st_size)
            )
    return tuple(records)


def strange_entries(run_root: Path) -> list[str]:
    """Entries that no run leaves: links, empty folders, and what is neither file nor folder."""
    problems = []
    for path in sorted(run_root.rglob("*")):
        name = path.relative_to(run_root).as_posix()
        if path.is_symlink():
            problems.append(f"{name}: a symbolic link")
        elif path.is_dir():
            if not any(path.iterdir()):
                problems.append(f"{name}: an empty folder")
        elif not path.is_file():
            problems.append(f"{name}: neither a file nor a folder")
    return problems


def _drop_empty_folders(run_root: Path) -> None:
    """A manifest cannot list a folder, so one that holds nothing is not kept."""
    for path in sorted(run_root.rglob("*"), reverse=True):
        if path.is_dir() and not path.is_symlink() and not any(path.iterdir()):
            path.rmdir()


def write_manifest(run_root: Path) -> Path:
    """Write the digests of all files of the run; returns the manifest's path."""
    _drop_empty_folders(run_root)
    lines = [f"{record.sha256}  {record.path}\n" for record in artifact_records(run_root)]
    path = run_root / MANIFEST_FILE
    write_atomic(path, "".join(lines))
    return path


def check_manifest(run_root: Path) -> list[str]:
    """What differs from the manifest: changed, missing and unlisted entries, each named.

    Raises `RunbookError` if there is no manifest or it cannot be read.
    """
    wanted = read_manifest(run_root / MANIFEST_FILE)
    problems = [f"{name}: {text}" for name, text in changed_files(run_root, wanted).items()]
    names = {path.relative_to(run_root).as_posix() for path in run_files(run_root)}
    unlisted = sorted(names - wanted.keys() - {MANIFEST_FILE})
    problems += [f"{name}: not listed in {MANIFEST_FILE}" for name in unlisted]
    return problems + strange_entries(run_root)


def changed_files(run_root: Path, wanted: Mapping[str, str]) -> dict[str, str]:
    """Each file of a manifest with these digests that is not as it says, and how it differs."""
    found = {}
    for name, sha256 in wanted.items():
        path = run_root / name
        if not path.resolve().is_relative_to(run_root.resolve()):
            found[name] = f"{MANIFEST_FILE} names a file outside the run"
        elif not path.is_file():
            found[name] = "missing"
        elif (digest := file_sha256(path)) != sha256:
            found[name] = f"changed (sha256 {digest[:12]}..., was {sha256[:12]}...)"
    return found


def read_manifest(path: Path) -> dict[str, str]:
    """The digest of each file by its name. Raises `RunbookError` if it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RunbookError(f"{path} cannot be read: {error}") from error
    wanted = {}
    for number, line in enumerate(text.splitlines(), start=1):
        sha256, separator, name = line.partition("  ")
        if not separator or len(sha256) != 64:
            raise RunbookError(f"{path}: line {number} is no digest and name")
        wanted[name] = sha256
    return wanted
