"""A file in blocks of whole lines, and its digest, in one pass and in memory that is used again."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from runbook.files import LARGEST_LOG_BYTES

_BLOCK_BYTES = 4 << 20
# What a rank says at its end is the longest of all lines, and takes some hundred kilobytes.
LONGEST_LINE = 16 << 20
# What a parser needs for a block and gives back. The C library returns freed memory to the system,
# to be cleared again for the next block, until something larger was freed: then it keeps that much.
_WORKING_BYTES = 24 << 20


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
        bytearray(_WORKING_BYTES)
        buffer, kept = bytearray(2 * _BLOCK_BYTES), 0
        left, lost = LARGEST_LOG_BYTES, 0
        with self._path.open("rb", buffering=0) as stream:
            while size := stream.readinto(memoryview(buffer)[kept:][: min(_BLOCK_BYTES, left)]):
                left -= size
                end = kept + size
                self._digest.update(memoryview(buffer)[kept:end])
                cut = buffer.rfind(b"\n", kept, end) + 1
                if cut:
                    # Of a line that was too long only its end is here.
                    begin = buffer.find(b"\n", kept, end) + 1 if lost else 0
                    self.endless += bool(lost)
                    lost = 0
                    if begin < cut:
                        yield bytes(memoryview(buffer)[begin:cut])
                    buffer[: end - cut] = buffer[cut:end]
                kept = end - cut
                if kept > LONGEST_LINE:
                    lost, kept = lost + kept, 0
                if len(buffer) < kept + _BLOCK_BYTES:
                    buffer.extend(bytes(len(buffer)))
            self.unread = 0 if left else max(0, os.fstat(stream.fileno()).st_size - stream.tell())
        self.torn, self.torn_bytes = bytes(buffer[:kept]), kept + lost
