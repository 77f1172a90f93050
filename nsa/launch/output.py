"""What a rank writes: files that fail loudly, its heartbeats, and the log.

Errors name the path, and no part of a file gets a final name. A heartbeat says what the rank is
doing now, on the wall and the monotonic clock; lines are appended without fsync (microseconds), and
`sync` is called at the ends of phases.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nsa.contract import HEARTBEATS, Event, Phase, memory_file
from nsa.contract.writing import write_whole


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
    """`write_whole`, in whose place the path is said where that fails."""
    try:
        write_whole(path, data)
    except OSError as error:
        raise RecordWriteError(path, error) from error


def plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with non-finite numbers as text, which JSON cannot hold otherwise."""
    return {
        name: repr(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in fields.items()
    }


def say(message: str, *, rank: int = 0) -> None:
    """Write one line for people on standard error; other ranks than 0 stay silent."""
    if rank == 0:
        shout(message)


def shout(message: str) -> None:
    """Write one line from any rank, in one piece."""
    sys.stderr.flush()
    os.write(2, (message + "\n").encode("utf-8", "replace"))


_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
MIB = 1024 * 1024


# As glibc has it at first, and M_MMAP_THRESHOLD of its malloc.h.
_LARGE_BYTES, _LARGE_FROM = 128 * 1024, -3


def keep_no_large_block() -> None:
    """Have malloc give each freed block of 128 KiB or more back to the kernel (mallopt(3)).

    By itself it raises that size to the largest block freed, and keeps ever more of them for
    hundreds of steps: resident memory then rises by jumps, as a leak's does.
    """
    ctypes.CDLL(None).mallopt(_LARGE_FROM, _LARGE_BYTES)


class ResidentMemory:
    """Resident memory of this process, read through one open file."""

    def __init__(self) -> None:
        self._fd = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)

    def mib(self) -> float:
        """Resident set size, MiB."""
        pages = int(os.pread(self._fd, 128, 0).split()[1])
        return round(pages * _PAGE_BYTES / MIB, 1)


class Heartbeat:
    """Events of one rank, the first of them `boot`; none before `open` gives it a file."""

    def __init__(self, *, rank: int, token: str) -> None:
        self.rank, self.token = rank, token
        self.step, self.phase = 0, Phase.INIT
        self.cuda_mib: Callable[[], float] | None = None
        self.memory = ResidentMemory()
        self._pid = os.getpid()
        self._file: LineFile | None = None
        self.run_dir: Path | None = None
        self.on_exit: Callable[[], None] | None = None

    def open(self, run_dir: Path) -> None:
        """Create `heartbeat_rank{r}.jsonl`. Raises FileExistsError for an earlier launch's."""
        self.run_dir = run_dir
        self._file = LineFile(run_dir / HEARTBEATS.name(self.rank))
        self.write(Event.BOOT)

    def write(self, event: Event, **fields: Any) -> None:
        """Append one event with times, memory, step and phase."""
        if self._file is None:
            return
        line = {
            "event": event,
            "ts": round(time.time(), 6),
            "mono": round(time.monotonic(), 6),
            "rank": self.rank,
            "pid": self._pid,
            "token": self.token,
            "step": self.step,
            "phase": self.phase,
            "rss_mib": self.memory.mib(),
            "cuda_mib": self.cuda_mib() if self.cuda_mib else None,
            **plain(fields),
        }
        self._file.append(json.dumps(line))

    def sync(self) -> None:
        """Put the events on the disk."""
        if self._file is not None:
            self._file.sync()

    def snapshot(self, *, when: str) -> None:
        """Write the memory use before or after this step ("pre", "post"), and say so."""
        if self.run_dir is None:
            return
        facts: dict[str, object] = {"step": self.step, "when": when, "rss_mib": self.memory.mib()}
        if self.cuda_mib is not None:
            import torch

            facts["cuda_allocated_mib"] = torch.cuda.memory_allocated() / MIB
            facts["cuda_reserved_mib"] = torch.cuda.memory_reserved() / MIB
            facts["cuda_peak_mib"] = torch.cuda.max_memory_allocated() / MIB
            facts["cuda_stats"] = dict(torch.cuda.memory_stats())
        path = self.run_dir / memory_file(when=when, step=self.step, rank=self.rank)
        write_json(path, facts)
        self.write(Event.MEMORY_DUMP, path=path.name)
