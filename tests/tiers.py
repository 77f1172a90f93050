"""Which of many alike belong to the fast tier, so that the others may be left to the long one.

A tenth by the hash of its name, the same for everybody, and what tests a file that was changed; of
drawn examples, and of every place where a file may be cut, a few.
"""

from __future__ import annotations

import subprocess
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import settings

LONG_TIER = "slow"
_SHARE = 10
# Of examples and places the fast tier takes one of so many.
_EACH = 4
_in_force: set[str] = set()

T = TypeVar("T")


def by_tier(
    values: Iterable[T], fast: Callable[[T], bool], name: Callable[[T], str] = str
) -> list[object]:
    """Each as a parameter, in the long tier unless it is `fast`."""
    return [
        pytest.param(one, id=name(one), marks=() if fast(one) else getattr(pytest.mark, LONG_TIER))
        for one in values
    ]


def begin_long() -> None:
    """Tests that are loaded from now on leave nothing out."""
    _in_force.add(LONG_TIER)


def few(values: Sequence[T]) -> Sequence[T]:
    """All of them in the long tier; else some, evenly, with the last."""
    return values if _in_force else values[(len(values) - 1) % _EACH :: _EACH]


def examples(number: int) -> settings:
    """So many drawn examples in the long tier, else fewer."""
    return settings(max_examples=number if _in_force else -(-number // _EACH), deadline=None)


def is_sampled(name: str, path: str) -> bool:
    """Is this defect, planted in the file that ends with this path, one of the fast tier?"""
    drawn = zlib.crc32(name.encode()) % _SHARE == 0
    return drawn or any(one.endswith(f"/{path}") for one in changed())


@cache
def changed() -> tuple[str, ...]:
    """Files that differ from main, where there is such a branch, and the uncommitted ones."""
    done = subprocess.run(
        ["git", "diff", "--name-only", "--merge-base", "main"],
        cwd=Path(__file__).parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return tuple(done.stdout.split("\n"))
