"""events.jsonl: the append-only journal of a run; everything else about a run follows from it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from runbook.errors import RunbookError
from runbook.files import sync_folder, utc_text

__all__ = ["EVENTS_FILE", "Event", "Journal", "read_events"]

EVENTS_FILE = "events.jsonl"
Event = Mapping[str, Any]


class Journal:
    """Appends one line per event; `sync=True` also waits for the disk.

    An event that was written is never changed. A torn last line, which only a crash leaves, is
    cut off when the journal is opened again, because nothing may be appended to half a line.
    """

    def __init__(self, path: Path, events: list[Event]) -> None:
        self.path = path
        self.events = events
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    @classmethod
    def create(cls, run_root: Path) -> Journal:
        """A new journal. Raises `FileExistsError` if the folder has one."""
        path = run_root / EVENTS_FILE
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        sync_folder(run_root)
        return cls(path, [])

    @classmethod
    def reopen(cls, run_root: Path) -> Journal:
        """The journal of an earlier run, ready for more. Raises `RunbookError` if it is damaged."""
        path = run_root / EVENTS_FILE
        events, whole_bytes = read_events(path)
        os.truncate(path, whole_bytes)
        return cls(path, events)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._file)

    def append(self, name: str, *, sync: bool = False, **fields: Any) -> None:
        """Write one event. Raises `OSError` if the disk refuses."""
        event = {"seq": len(self.events) + 1, "ts": utc_text(), "event": name, **fields}
        line = json.dumps(event, separators=(",", ":"), ensure_ascii=False) + "\n"
        data = line.encode()
        size = os.fstat(self._file).st_size
        try:
            while data:
                data = data[os.write(self._file, data) :]
            if sync:
                os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, size)  # half an event would make the whole journal unreadable
            raise
        self.events.append(json.loads(line))


def read_events(path: Path) -> tuple[list[Event], int]:
    """The whole events of a journal, and how many bytes they take.

    A torn last line is left out. Raises `RunbookError` if an earlier line is damaged or missing,
    which no crash can do.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RunbookError(f"{path} cannot be read: {error.strerror or error}") from error
    end = data.rfind(b"\n") + 1
    events: list[Event] = []
    for number, line in enumerate(data[:end].split(b"\n")[:-1], start=1):
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            event = None
        if not isinstance(event, dict) or event.get("seq") != number:
            raise RunbookError(f"{path}: line {number} is damaged or out of order")
        events.append(event)
    return events, end
