"""A launch's folder: its files read as evidence, whole or while they grow.

Here: files of lines, read whole or followed while they grow, and what a heartbeat's line says.
Complete lines only.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from nsa.contract import HEARTBEATS, Event, ExitCode
from runbook.files import LARGEST_LOG_BYTES
from runbook.folder.launch.shapes import is_count

_BLOCK_BYTES = 4 << 20
# What a rank says at its end is the longest of all lines, and takes some hundred kilobytes.
LONGEST_LINE = 16 << 20
_TAIL_BYTES = 1 << 20
_LONGEST_TAIL_LINE = 1 << 20
_HEAD_BYTES = 256


class WholeLines:
    """Iterates over blocks that end in a newline; afterwards has the file's digest and torn tail.

    A line that is longer than a block comes in one block all the same, up to a bound: one beyond it
    is left out and counted in `endless`, and of a torn tail its end is kept. `unread` bytes stand
    behind what is read of the largest log. Raises `OSError`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._digest = hashlib.sha256()
        self.torn = b""
        self.torn_bytes = 0
        self.endless = 0
        self.unread = 0

    @property
    def problems(self) -> list[str]:
        """What is wrong with the file, whatever its lines are."""
        endless = f"{self.endless} lines of over {LONGEST_LINE} bytes were dropped"
        unread = f"{self.unread} bytes behind the first {LARGEST_LOG_BYTES} were not read"
        return [*([endless] if self.endless else []), *([unread] if self.unread else [])]

    @property
    def sha256(self) -> str:
        """The digest of everything that was read so far, the torn tail included."""
        return self._digest.hexdigest()

    def __iter__(self) -> Iterator[bytes]:
        torn, left, lost = b"", LARGEST_LOG_BYTES, 0
        with self._path.open("rb", buffering=0) as stream:
            while block := stream.read(min(_BLOCK_BYTES, left)):
                left -= len(block)
                self._digest.update(block)
                block = torn + block
                cut = block.rfind(b"\n") + 1
                whole, torn = block[:cut], block[cut:]
                if whole and lost:  # of a line that was too long only its end is here
                    whole = whole[whole.find(b"\n") + 1 :]
                    self.endless, lost = self.endless + 1, 0
                if whole:
                    yield whole
                if len(torn) > LONGEST_LINE:
                    torn, lost = b"", lost + len(torn)
            self.unread = 0 if left else max(0, os.fstat(stream.fileno()).st_size - stream.tell())
        self.torn, self.torn_bytes = torn, len(torn) + lost


class LineTail:
    """Gives the lines that were completed since the last call; memory stays flat.

    A file that became shorter, or that is another file under the same name, is read from its
    beginning. With `replaced`, where loggers put a longer file in the place of one that it goes on
    with, it is another one only if it begins otherwise. `anew` counts how often that happened,
    `changed_at` is the wall time of the last change that was read. `ends` are bytes of which each
    ends a line.
    """

    def __init__(self, path: Path, *, replaced: bool = False, ends: bytes = b"\n") -> None:
        self.path, self._name = path, os.fspath(path)
        self._replaced, self._ends = replaced, ends
        self._offset, self._head = 0, b""
        self._inode: int | None = None
        self._pending = b""
        self.blocks_read, self.anew = 0, 0
        self.changed_at: float | None = None

    def lines(self) -> Iterator[bytes]:
        """New complete lines without their ends; nothing while there is no file."""
        block = self._read()
        while block:
            self.blocks_read += 1
            for end in self._ends[1:]:
                block = block.replace(bytes([end]), self._ends[:1])
            *whole, pending = (self._pending + block).split(self._ends[:1])
            self._pending = pending[:_LONGEST_TAIL_LINE]
            yield from whole
            # A block that is not full was the end of the file: looking again is for the next call.
            block = self._read() if len(block) == _TAIL_BYTES else b""

    def _read(self) -> bytes:
        """What the file has gained. It is opened anew: a network file system shows growth then."""
        try:
            # Nobody may ever write to a pipe in its place, and to wait for that would be a hang.
            handle = os.open(self._name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return b""
        try:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                return b""
            if self._is_another(handle, status):
                self.anew += self._inode is not None
                self._offset, self._head, self._pending = 0, b"", b""
            self._inode = status.st_ino
            if status.st_size == self._offset:
                return b""
            # Nobody waits for what a file that grew by so much at once held in between.
            if status.st_size - self._offset > LARGEST_LOG_BYTES:
                self._offset = status.st_size - _TAIL_BYTES
            if self._replaced and len(self._head) < _HEAD_BYTES:
                self._head = os.pread(handle, min(_HEAD_BYTES, status.st_size), 0)
            block = os.pread(handle, _TAIL_BYTES, self._offset)
        except OSError:
            return b""
        finally:
            os.close(handle)
        self._offset += len(block)
        self.changed_at = status.st_mtime
        return block

    def _is_another(self, handle: int, status: os.stat_result) -> bool:
        if status.st_size < self._offset or self._inode is None:
            return True
        if self._replaced:
            return os.pread(handle, len(self._head), 0) != self._head
        return status.st_ino != self._inode


class TableTail:
    """Rows of a growing CSV file as text by column; unreadable rows are left out.

    A reader that decides from these rows must be content with what it can read: damage is the
    judge's business.
    """

    def __init__(self, path: Path) -> None:
        self._tail, self.path = LineTail(path), path
        self._columns: tuple[str, ...] = ()

    def rows(self) -> Iterator[dict[str, str]]:
        """New whole rows."""
        for line in self._tail.lines():
            fields = tuple(line.decode("utf-8", "replace").strip("\r\ufeff").split(","))
            if fields[0] == "step":
                self._columns = fields
            elif b"\0" not in line and len(fields) == len(self._columns):
                yield dict(zip(self._columns, fields, strict=True))


STEPPING = frozenset({Event.STEP_START, Event.STEP_END, Event.PROGRESS})
_KNOWN = frozenset(Event)
# No training has as many steps; a larger number may not be exact in a float64.
MOST_STEPS = 2**53


@dataclass(frozen=True, kw_only=True)
class Exit:
    """How a rank said that it ended."""

    code: int
    reason: str
    steps_done: int | None

    @classmethod
    def told_by(cls, record: Mapping[str, Any]) -> Exit:
        """The end in an exit record. One that cannot say its code is no good exit."""
        code = whole_number(record.get("code"))
        return cls(
            code=ExitCode.CRASH if code is None else code,
            reason=str(record.get("reason") or ""),
            steps_done=whole_number(record.get("steps_done")),
        )


def heartbeat_files(run_dir: Path) -> dict[int, Path]:
    """The heartbeat files of a run directory, by rank."""
    return HEARTBEATS.found_in(run_dir)


def heartbeats_in(path: Path) -> Iterator[Mapping[str, Any]]:
    """The readable records of a file, one by one. Raises `OSError`."""
    with path.open("rb") as stream:
        while (line := stream.readline(LONGEST_LINE)) and stream.tell() <= LARGEST_LOG_BYTES:
            record = parse_heartbeat(line) if line.endswith(b"\n") else None
            if record is not None:
                yield record


def parse_heartbeat(line: bytes) -> Mapping[str, Any] | None:
    """The record of a complete line, or None if it is no JSON object."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def parse_heartbeats(lines: Sequence[bytes]) -> list[Mapping[str, Any] | None]:
    """The records of many lines, as `parse_heartbeat` has each of them."""
    try:
        # It takes a third of the time, but no text that is not Unicode, as a path may be.
        found = list(map(from_json, lines))
    except ValueError:
        return list(map(parse_heartbeat, lines))
    return [record if isinstance(record, dict) else None for record in found]


def event_of(record: Mapping[str, Any]) -> str | None:
    """The event that a record tells, by either name that trainers have for it; None for none."""
    event = record["event"] if "event" in record else record.get("msg")
    return event if isinstance(event, str) else None


def step_of(record: Mapping[str, Any]) -> int | None:
    """The step that a record tells; None for what no training can have done."""
    step = whole_number(record.get("step"))
    return step if step is not None and 0 <= step < MOST_STEPS else None


def is_of_training(event: str | None) -> bool:
    """Whether an event tells the step of the training: also one of another trainer's own."""
    return event in STEPPING or event not in _KNOWN


def whole_number(value: object) -> int | None:
    """The value if it is an integer of 64 bits; JSON's true and false are none."""
    return value if isinstance(value, int) and is_count(value) else None
