"""Files that fail loudly (errors name the path, no part gets a final name), and the log."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class RecordWriteError(OSError):
    """A record of the run could not be written; the message names the file and the cause."""

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(error.errno, f"cannot write {path}: {error.strerror or error}")


class LineFile:
    """An append-only file of whole lines. It must not exist yet: nobody's lines get mixed.

    Raises FileExistsError where it does, RecordWriteError when a line cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        try:
            self._fd = os.open(path, flags, 0o600)
        except FileExistsError:
            raise
        except OSError as error:
            raise RecordWriteError(path, error) from error

    def append(self, line: str) -> None:
        """Write one line; the newline is added here."""
        data = line.encode() + b"\n"
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            raise RecordWriteError(self.path, error) from error

    def sync(self) -> None:
        """Put what was written on the disk."""
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise RecordWriteError(self.path, error) from error


def write_json(path: Path, value: Any) -> None:
    """Write JSON under a temporary name, put it on the disk, then rename it."""
    write_bytes(path, (json.dumps(value, indent=1, sort_keys=False) + "\n").encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Write a whole file under a temporary name, put it on the disk, then rename it."""
    temporary = path.with_name(f".{path.name}.tmp{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
        sync_folder(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RecordWriteError(path, error) from error


def sync_folder(folder: Path) -> None:
    """Put a folder's entries on the disk, so that a rename in it survives a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with non-finite numbers as text, which JSON cannot hold otherwise."""
    return {
        name: repr(value) if isinstance(value, float) and not _finite(value) else value
        for name, value in fields.items()
    }


def _finite(value: float) -> bool:
    return value - value == 0.0


def say(message: str, *, rank: int = 0) -> None:
    """Write one line for people on standard error; other ranks than 0 stay silent."""
    if rank == 0:
        shout(message)


def shout(message: str) -> None:
    """Write one line from any rank, in one piece."""
    sys.stderr.flush()
    os.write(2, (message + "\n").encode("utf-8", "replace"))
