"""What a phase shows beside its checks: tables, curves, and the values behind a decision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from pydantic import Field, model_validator

from runbook.records.measurement import Cell, Measurement, Record, Window

MAX_POINTS = 400


class Mark(Record):
    """A labelled level, such as a limit, to hold values against."""

    label: str = Field(min_length=1)
    value: float


class Span(Record):
    """A labelled stretch between two levels, such as the differences that are accepted."""

    label: str = Field(min_length=1)
    low: float
    high: float


class Series(Record):
    """Points (x, y) of one curve. It illustrates; no check is ever judged from it.

    `path` and `sha256` name the artifact that holds every point. Curves of one `group` are drawn
    to one scale, each under its `label`. The steps of `warmup` count in no statistic; `window` are
    those of the last-50 statistic.
    """

    name: str = Field(min_length=1)
    x_label: str = "step"
    unit: str
    points: tuple[tuple[float, float], ...] = Field(min_length=1, max_length=MAX_POINTS)
    n: int = Field(ge=1)
    group: str = ""
    label: str = ""
    warmup: Window | None = None
    window: Window | None = None
    limits: tuple[Mark, ...] = ()
    path: str = Field(min_length=1)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")

    @model_validator(mode="before")
    @classmethod
    def _of_older_records(cls, given: object) -> object:
        """A series of an older record has one `limit` without a label."""
        if not isinstance(given, Mapping) or "limit" not in given:
            return given
        kept = {name: value for name, value in given.items() if name != "limit"}
        if given["limit"] is not None:
            kept["limits"] = ({"label": "limit", "value": given["limit"]},)
        return kept


class Compared(Record):
    """What one estimate rests on: `values` of the rounds, pairs or launches, in their order.

    The measurement holds the estimate and the interval that decided; `decides` is False for what
    is only shown beside it.
    """

    label: str = Field(min_length=1)
    values: tuple[float, ...]
    measurement: Measurement
    decides: bool = True


class Comparison(Record):
    """The single values behind one decision, with the levels that it was held against.

    `check` is the row that it decided, `each` what one value is of, `answer` the decision in a
    word. `margin` is the stretch in which a difference is accepted.
    """

    check: str = Field(min_length=1)
    title: str = Field(min_length=1)
    each: str
    unit: str
    answer: str = ""
    rows: tuple[Compared, ...] = Field(min_length=1)
    reference: Mark | None = None
    margin: Span | None = None
    limits: tuple[Mark, ...] = ()


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


class Table(Record):
    """A table of a phase, such as bucket size against last-50-step mean and stdev."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
