"""A finished run as one file to send on: the same bytes every time, and no secret that is known.

The archive holds the run's folder, and beside it what was put in. Unpacked anywhere, the run is
verified and reported like here.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from runbook.errors import RunbookError, UsageError
from runbook.files import written_to
from runbook.folder.manifest import check_manifest, files_by_name, strange_entries
from runbook.folder.names import MANIFEST_FILE
from runbook.folder.redact import redact_text, secret_lines
from runbook.records import RunRecord

_SHOWN_LINES = 5


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A file of the bundle: its name in the run's folder, its digest there, blanked lines."""

    name: str
    size_bytes: int
    sha256: str
    blanked: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """What a bundle holds. `changed` says what was not as the manifest has it before packing."""

    run_id: str
    path: Path
    size_bytes: int
    files: tuple[Packed, ...]
    changed: tuple[str, ...]

    @property
    def blanked(self) -> tuple[Packed, ...]:
        """The files in which something was blanked: `runbook verify` names them as changed."""
        return tuple(one for one in self.files if one.blanked)


def write_bundle(record: RunRecord, run_root: Path, path: Path, *, blank: bool = False) -> Bundle:
    """Write the run as a .tar.gz for its owner only and return what is in it.

    Secrets are looked for in every file. Where there is one, RunbookError names file and lines, or
    with `blank` it is blanked, and then `runbook verify` names that file. Raises `UsageError` if
    the run is not finished, holds links, or if `path` exists or lies in the run's folder.
    """
    _refuse(record, run_root, path)
    contents = dict(_contents(run_root))
    secrets = {name: tuple(lines) for name, data in contents.items() if (lines := _secrets(data))}
    if secrets and not blank:
        where = [f"{name}: line {_lines(lines)}" for name, lines in secrets.items()]
        hint = "--blank-secrets blanks them; `runbook verify` then names these files as changed"
        raise UsageError([f"what looks like a secret is in {text}" for text in where], hint=hint)
    for name in secrets:
        contents[name] = redact_text(_text(contents[name])).encode("utf-8", "surrogateescape")
    files = tuple(
        Packed(
            name=name,
            size_bytes=len(data),
            sha256=hashlib.sha256(data).hexdigest(),
            blanked=secrets.get(name, ()),
        )
        for name, data in contents.items()
    )
    changed = tuple(check_manifest(run_root))
    with written_to("--to bundle", path):
        _write(record, path, contents, files)
    return Bundle(
        run_id=record.run_id,
        path=path,
        size_bytes=path.stat().st_size,
        files=files,
        changed=changed,
    )


def _refuse(record: RunRecord, run_root: Path, path: Path) -> None:
    if not (run_root / MANIFEST_FILE).is_file():
        text = f"{record.run_id} has no {MANIFEST_FILE}: it is not finished"
        raise UsageError(text, hint="`runbook run --resume` goes on with it")
    if run_root.resolve().name != record.run_id:
        raise UsageError(f"the folder {run_root} holds the run {record.run_id}: rename it back")
    if strange := [text for text in strange_entries(run_root) if "an empty folder" not in text]:
        raise UsageError([f"not packed: {text}" for text in strange])
    if path.resolve().is_relative_to(run_root.resolve()):
        raise UsageError(f"{path} lies in the run's own folder", hint="name another with --to")
    if path.exists() or path.is_symlink():
        raise UsageError(f"{path} is there already", hint="name another file with --to")
    if not path.parent.is_dir():
        raise UsageError(f"no folder {path.parent}/", hint="name a file in a folder that is there")


def _contents(run_root: Path) -> Iterator[tuple[str, bytes]]:
    for name, path in files_by_name(run_root).items():
        # A file that became a link since it was listed is not followed.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(handle, "rb") as stream:  # noqa: PTH123 - of a handle
            yield name, stream.read()


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _secrets(data: bytes) -> list[int]:
    return secret_lines(_text(data))


def _lines(numbers: tuple[int, ...]) -> str:
    more = f" and {len(numbers) - _SHOWN_LINES} more" if len(numbers) > _SHOWN_LINES else ""
    return ", ".join(map(str, numbers[:_SHOWN_LINES])) + more


def _write(
    record: RunRecord, path: Path, contents: dict[str, bytes], files: tuple[Packed, ...]
) -> None:
    about = {
        "schema_version": 1,
        "run_id": record.run_id,
        "files": [vars(one) | {"blanked": list(one.blanked)} for one in files],
    }
    members = {f"{record.run_id}/{name}": data for name, data in contents.items()}
    members[f"{record.run_id}.bundle.json"] = f"{json.dumps(about, indent=2)}\n".encode()
    when = _seconds(record.started_at)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with (
            open(handle, "wb") as raw,  # noqa: PTH123 - of a handle
            gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            for name in sorted(members):
                info = tarfile.TarInfo(name)
                info.size, info.mode, info.mtime = len(members[name]), 0o600, when
                archive.addfile(info, io.BytesIO(members[name]))
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _seconds(started_at: str) -> int:
    try:
        return int(datetime.fromisoformat(started_at).timestamp())
    except ValueError as error:
        raise RunbookError(f"run.json: started_at {started_at!r} is no time") from error
