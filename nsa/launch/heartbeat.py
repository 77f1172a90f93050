"""One heartbeat file per rank: what it is doing now, on the wall and the monotonic clock.

Lines are appended without fsync (microseconds); `sync` is called at the ends of phases.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nsa.contract import HEARTBEATS, Event, Phase, memory_file
from nsa.launch.output import LineFile, plain, write_json

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
MIB = 1024 * 1024


class ResidentMemory:
    """Resident memory of this process, read through one open file."""

    def __init__(self) -> None:
        self._fd = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)

    def mib(self) -> float:
        """Resident set size, MiB."""
        pages = int(os.pread(self._fd, 128, 0).split()[1])
        return round(pages * _PAGE_BYTES / MIB, 1)


class Heartbeat:
    """Events of one rank. Until `open` gives it a file, events are kept and written then."""

    def __init__(self, *, rank: int, token: str) -> None:
        self.rank, self.token = rank, token
        self.step, self.phase = 0, Phase.INIT
        self.cuda_mib: Callable[[], float] | None = None
        self.memory = ResidentMemory()
        self._pid = os.getpid()
        self._file: LineFile | None = None
        self._early: list[dict[str, Any]] = []
        self.run_dir: Path | None = None
        self.on_exit: Callable[[], None] | None = None

    def open(self, run_dir: Path) -> None:
        """Create `heartbeat_rank{r}.jsonl`. Raises FileExistsError for an earlier launch's."""
        self.run_dir = run_dir
        self._file = LineFile(run_dir / HEARTBEATS.name(self.rank))
        for line in self._early:
            self._file.append(json.dumps(line | {"token": self.token}))
        self._early = []

    def write(self, event: Event, **fields: Any) -> None:
        """Append one event with times, memory, step and phase."""
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
        if self._file is None:
            self._early.append(line)
        else:
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
