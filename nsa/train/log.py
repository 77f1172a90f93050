"""Progress for people, on standard error: one line at a time, from rank 0 unless told otherwise."""

from __future__ import annotations

import os
import sys


def say(message: str, *, rank: int = 0) -> None:
    """Write one line on behalf of a rank; other ranks than 0 stay silent."""
    if rank == 0:
        shout(message)


def shout(message: str) -> None:
    """Write one line from any rank, in one piece."""
    sys.stderr.flush()
    os.write(2, (message + "\n").encode("utf-8", "replace"))
