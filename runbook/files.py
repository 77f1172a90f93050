"""Writing that leaves either the old file or the new one, and folders that only the owner reads."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

__all__ = ["make_private_dir", "utc_text", "write_atomic"]


def write_atomic(path: Path, text: str) -> None:
    """Write `text` to a temporary name beside `path`, sync it, and rename it into place."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a rename in this folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_private_dir(path: Path) -> None:
    """Create `path` and its missing parents, each for the owner only; it must not exist yet.

    Raises `FileExistsError` if it does.
    """
    if not path.parent.is_dir():
        make_private_dir(path.parent)
    path.mkdir(mode=0o700)
    path.chmod(0o700)  # whatever the umask was


def utc_text(moment: datetime | None = None) -> str:
    """Now, or `moment`, as `2026-01-31T12:00:00Z`."""
    return (moment or datetime.now(UTC)).astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
