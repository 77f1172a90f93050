"""A file in blocks of whole lines, and its digest, in one pass and in memory that is used again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

_BLOCK_BYTES = 4 << 20
# What a parser needs for a block and gives back. The C library returns freed memory to the system,
# to be cleared again for the next block, until something larger was freed: then it keeps that much.
_WORKING_BYTES = 24 << 20


class WholeLines:
    """Iterates over blocks that end in a newline; afterwards has the file's digest and torn tail.

    A line that is longer than a block comes in one block all the same. Raises `OSError`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._digest = hashlib.sha256()
        self.torn = b""

    @property
    def sha256(self) -> str:
        """The digest of everything that was read so far, the torn tail included."""
        return self._digest.hexdigest()

    def __iter__(self) -> Iterator[bytes]:
        bytearray(_WORKING_BYTES)
        buffer, kept = bytearray(2 * _BLOCK_BYTES), 0
        with self._path.open("rb", buffering=0) as stream:
            while size := stream.readinto(memoryview(buffer)[kept : kept + _BLOCK_BYTES]):
                end = kept + size
                self._digest.update(memoryview(buffer)[kept:end])
                cut = buffer.rfind(b"\n", kept, end) + 1
                if cut:
                    yield bytes(memoryview(buffer)[:cut])
                kept = end - cut
                buffer[:kept] = buffer[cut:end]
                if len(buffer) < kept + _BLOCK_BYTES:
                    buffer.extend(bytes(len(buffer)))
        self.torn = bytes(buffer[:kept])
