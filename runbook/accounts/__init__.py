"""Accounts that must balance: facts of one launch that two sources tell, held against each other.

What the trainer says about itself is believed only where something else in the same folder says
so too. Every account returns what does not balance, in words; a source that is missing does not
balance either. `registry` has all of them: rows and `inspect` go through the same table.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any

from runbook.records.evidence import RankLog

if TYPE_CHECKING:
    import pandas as pd


def each_rank(check: Callable[..., Iterable[str]]) -> Callable[..., list[str]]:
    """An account of all `ranks`, made from one of a `rank`: its texts go on behind `rank 1`."""
    inner = inspect.signature(check)
    named = ((name.replace("rank", "ranks"), one) for name, one in inner.parameters.items())
    outer = inner.replace(parameters=[one.replace(name=name) for name, one in named])

    @wraps(check)
    def account(*args: Any, **named: Any) -> list[str]:
        given = outer.bind(*args, **named).arguments
        ranks = given.pop("ranks")
        return [f"rank {rank.rank}{text}" for rank in ranks for text in check(rank=rank, **given)]

    vars(account)["__signature__"] = outer
    return account


def within(value: object, limit: float) -> bool:
    """Is it a number from 0 to the limit?"""
    return isinstance(value, int | float) and 0 <= value <= limit


def apart(one: object, other: object) -> float:
    """How far two numbers lie apart; NaN, which is near nothing, where one is none."""
    if not (isinstance(one, int | float) and isinstance(other, int | float)):
        return math.nan
    return abs(one - other)


def due(rank: RankLog, every: int) -> set[int]:
    """The steps after which something is asked for; of the last one the launch's end decides."""
    if not every or rank.steps is None:
        return set()
    ended = rank.steps["step"].iloc[:-1]
    return set(ended[ended % every == 0].astype(int))


def computed_twice(
    frame: pd.DataFrame, column: str, again: Mapping[str, Any], name: str
) -> list[tuple[int, float, float]]:
    """Steps that a rank computed a second time, each with the CSV's number and what came out.

    `again` is what the rank tells of them. The CSV's is NaN where that has no such step.
    """
    told = dict(zip(frame["step"].tolist(), frame[column].tolist(), strict=True))
    both = zip(again.get("steps") or (), again.get(name) or (), strict=False)
    return [(step, told.get(step, math.nan), found) for step, found in both]
