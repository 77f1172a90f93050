"""Tables that say what they could not read instead of leaving it out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from phases.common.finding import Unanswerable

__all__ = ["gather", "optional", "rounded"]

T = TypeVar("T")


def optional(read: Callable[[], T]) -> T | None:
    """What `read` returns, or None where there is no evidence for it."""
    try:
        return read()
    except Unanswerable:
        return None


def gather(found: Iterable[T | None]) -> tuple[T, ...]:
    """Everything that is there."""
    return tuple(item for item in found if item is not None)


def rounded(value: float | None, digits: int = 1) -> float | None:
    """A number for a table's cell."""
    return None if value is None else round(value, digits)
