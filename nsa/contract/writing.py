"""How files and links come onto the disk, so that nobody ever sees half of one."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from nsa.contract import LATEST_LINK


def write_whole(path: Path, data: bytes) -> None:
    """Write a file under a temporary name beside it, put it on the disk, then rename it.

    Raises OSError; then there is no file, or the one that was there before.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Put a folder's entries on the disk, so that a rename in it survives a power cut."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def link_latest(folder: Path, run_dir: Path) -> None:
    """Point `latest` in a folder at a run directory below it, replacing the link in one step.

    Raises OSError where that cannot be, and where somebody's file has that name.
    """
    link, temporary = folder / LATEST_LINK, folder / f".{LATEST_LINK}-{os.getpid()}"
    if link.exists() and not link.is_symlink():
        raise FileExistsError(errno.EEXIST, "it is there and no link", str(link))
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(run_dir.relative_to(folder))
    temporary.replace(link)
