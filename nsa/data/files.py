"""What files held when a run read them, so that it does not go on with others."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

# Read whole where all files together are no larger; else blocks of each, spread evenly over it.
_MOST_BYTES = 1 << 30
_BLOCK_BYTES = 64 << 10


def digests(root: Path, files: Sequence[Path], *, most_bytes: int = _MOST_BYTES) -> dict[str, str]:
    """Of each file below `root`, by its name there, its size and the SHA-256 of what it holds.

    Of files that hold more than `most_bytes` together only so much is read: a change between
    two blocks that leaves the size as it is can go unnoticed there. Raises OSError.
    """
    sizes = {file: file.stat().st_size for file in files}
    whole = sum(sizes.values()) <= most_bytes
    blocks = 0 if whole else max(2, most_bytes // _BLOCK_BYTES // len(files))
    return {
        file.relative_to(root).as_posix() if file != root else file.name: _digest(
            file, size, blocks
        )
        for file, size in sizes.items()
    }


def changes(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Each file that is another one now, that is gone or that came, in words."""
    found = [
        f"{name} {'holds something else' if name in now else 'is gone'}"
        for name, digest in then.items()
        if now.get(name) != digest
    ]
    return [*found, *(f"{name} was not there" for name in now if name not in then)]


def _digest(file: Path, size: int, blocks: int) -> str:
    """`blocks` 0: of the whole file."""
    with file.open("rb") as data:
        if not blocks or size <= blocks * _BLOCK_BYTES:
            return f"{size}:{hashlib.file_digest(data, 'sha256').hexdigest()}"
        digest = hashlib.sha256()
        for number in range(blocks):
            data.seek(number * (size - _BLOCK_BYTES) // (blocks - 1))
            digest.update(data.read(_BLOCK_BYTES))
    return f"{size}:{blocks}:{digest.hexdigest()}"
