"""Loading modules that stay for good, without looking for garbage in them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def for_good() -> Iterator[None]:
    """What is imported inside is not searched for garbage, now or in any later collection.

    torch makes a million objects. Without this the collector goes through them again and again
    while they are made, a fifth of the start of a rank, and once more wherever it looks at all.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
