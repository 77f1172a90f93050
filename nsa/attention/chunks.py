"""How many queries are worked through at once: as many as a budget of bytes allows."""

from __future__ import annotations

# What the scores, or the mask, of one chunk of queries may take. At S = 2,048 of the production
# shape all queries of 16 sequences are one chunk: more chunks are more launches and nothing else.
CHUNK_BYTES = 256 << 20


def chunks(start: int, stop: int, row_bytes: int) -> list[tuple[int, int]]:
    """Cut queries [start, stop) evenly, so that the rows of each chunk fit `CHUNK_BYTES`."""
    total = stop - start
    size = max(1, -(-total // max(1, -(-total * row_bytes // CHUNK_BYTES))))
    return [(at, min(at + size, stop)) for at in range(start, stop, size)]
