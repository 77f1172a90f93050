"""A curve for the report's plots: a thinned copy of columns that stay in an artifact."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from pydantic import Field

from runbook.records._base import Record

__all__ = ["MAX_POINTS", "Series", "thin_points"]

MAX_POINTS = 400


class Series(Record):
    """Points (x, y) of one curve. It illustrates; no check is ever judged from it.

    `path` and `sha256` name the artifact that holds every point. `limit` is drawn as a line.
    """

    name: str = Field(min_length=1)
    x_label: str = "step"
    unit: str
    points: tuple[tuple[float, float], ...] = Field(min_length=1, max_length=MAX_POINTS)
    n: int = Field(ge=1)
    limit: float | None = None
    path: str = Field(min_length=1)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


def thin_points(
    xs: Sequence[float], ys: Sequence[float], *, keep: int = MAX_POINTS
) -> tuple[tuple[float, float], ...]:
    """At most `keep` of the points, in order: the lowest and highest of each stretch survive.

    Dips and peaks are what a reader looks for, so a plain stride would hide them.
    """
    points = [(float(x), float(y)) for x, y in zip(xs, ys, strict=True)]
    if keep < 2:
        raise ValueError(f"keep must be at least 2, got {keep}")
    if len(points) <= keep:
        return tuple(points)
    stretches = keep // 2
    edges = [round(index * len(points) / stretches) for index in range(stretches + 1)]
    kept: set[int] = set()
    for start, stop in pairwise(edges):
        indices = range(start, stop)
        kept.add(min(indices, key=lambda index: points[index][1]))
        kept.add(max(indices, key=lambda index: points[index][1]))
    return tuple(points[index] for index in sorted(kept))
