"""What the ranks of a launch hold, read from the kernel while they run."""

from __future__ import annotations

import csv
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from nsa.contract import CHECKPOINTS_DIR
from runbook.folder.launch.documents import RESOURCES
from runbook.folder.names import RESOURCES_CSV
from runbook.launch.watch.ranks import RankState

_SHM = Path("/dev/shm")  # noqa: S108 - what is there is counted, nothing is written
_BLOCK_BYTES, _MIB = 512, 1 << 20
_PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / _MIB


class ResourceLog:
    """Appends a row for each rank of this machine to `resources.csv` in the launch's folder.

    Resident MiB, descriptors, threads and children are the rank's own. The MiB in /dev/shm are
    those of this user's files that changed since the launch began; the MiB of the folder are
    without checkpoints, which a profile asks for. A rank on another machine has no row.
    """

    def __init__(self, run_dir: Path) -> None:
        self._folder, self._began = run_dir, time.time()
        self._path = run_dir / RESOURCES_CSV

    def look(self, ranks: Iterable[RankState]) -> None:
        """Note what each rank that lives holds now. Raises OSError where the disk refuses."""
        held = [
            (state, counts)
            for state in ranks
            if state.handle is not None and (counts := _held_by(state.pid or 0))
        ]
        if not held:
            return
        now, begins = f"{time.monotonic():.3f}", not self._path.exists()
        shared = (
            f"{_mib(self._shared()):.1f}",
            f"{_mib(_files(self._folder)):.1f}",
            f"{shutil.disk_usage(self._folder).free / _MIB:.0f}",
        )
        with self._path.open("a", encoding="utf-8", newline="") as stream:
            rows = csv.writer(stream, lineterminator="\n")
            if begins:
                rows.writerow(RESOURCES.columns)
            rows.writerows((now, s.step, s.rank, *counts, *shared) for s, counts in held)

    def _shared(self) -> Iterator[os.stat_result]:
        """Files in /dev/shm that this launch may have made."""
        user = os.getuid()
        return (one for one in _files(_SHM) if one.st_uid == user and one.st_ctime >= self._began)


def _held_by(pid: int) -> tuple[str, int, int, int] | None:
    """Resident MiB, descriptors, threads, children of a process; None if gone or not ours."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        descriptors = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return None
    # A process that ends has given its descriptors back already.
    resident = resident_mib(pid)
    if not descriptors or resident is None:
        return None
    return f"{resident:.1f}", descriptors, len(threads), _children(threads)


def resident_mib(pid: int) -> float | None:
    """Resident memory of a process, MiB; None if it is gone, or has ended and holds none."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text("utf-8").split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * _PAGE_MIB or None


def _children(threads: Iterable[Path]) -> int:
    count = 0
    for thread in threads:
        try:
            count += len((thread / "children").read_bytes().split())
        except FileNotFoundError:
            continue  # the thread has ended meanwhile, or the kernel does not tell
    return count


def _files(folder: Path) -> Iterator[os.stat_result]:
    """The files below a folder as far as they can be looked at, without checkpoints."""
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        try:
            if entry.is_dir(follow_symlinks=False):
                if entry.name != CHECKPOINTS_DIR:
                    yield from _files(Path(entry.path))
            else:
                yield entry.stat(follow_symlinks=False)
        except OSError:
            continue  # gone meanwhile


def _mib(files: Iterable[os.stat_result]) -> float:
    return sum(one.st_blocks for one in files) * _BLOCK_BYTES / _MIB
