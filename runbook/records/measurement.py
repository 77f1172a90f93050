"""A number with everything needed to believe it, and what a phase shows beside its checks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json, to_json

# The one spelling of throughput in everything that is shown; the CSV column is `toks_per_s`.
TOKENS_PER_SECOND = "tok/s"
MIB_PER_GIB = 1024.0

_WORDS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


def _number_of_word(value: object) -> object:
    """JSON has no NaN: it is stored as a word, and must come back as the number it was."""
    return _WORDS.get(value, value) if isinstance(value, str) else value


Scalar = Annotated[float | str | bool, BeforeValidator(_number_of_word)]
Cell = Annotated[str | float | int | None, BeforeValidator(_number_of_word)]


def _word(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def plain_number(value: float | int | str | bool | None) -> str:
    """A value as text: four significant digits, whole from 10,000 on, yes/no, NaN, - for None."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, float):
        return str(value)
    if not math.isfinite(value):
        return _word(value)
    return f"{value:.0f}" if 10_000 <= abs(value) < 1e15 else f"{value:.4g}"


def json_ready(value: Any) -> Any:
    """The same document with NaN and infinities as words: JSON has no numbers for them."""
    return from_json(to_json(value, inf_nan_mode="strings"))


class Record(BaseModel):
    """An immutable record; an unknown field is an error, so a schema cannot drift unseen."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=True, ser_json_inf_nan="strings"
    )


def unsaid(default: Any, **bounds: Any) -> Any:
    """A field that a document leaves out where it has its default, so that old ones stay equal."""
    return Field(default=default, exclude_if=lambda value: bool(value == default), **bounds)


def first_problem(error: ValidationError) -> str:
    """The first thing that is wrong with a document, and where."""
    first = error.errors(include_url=False)[0]
    return ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))


def duration_text(seconds: float) -> str:
    """`2.25 s`, `41 s`, `3 min 20 s` or `2 h 05 min`."""
    if seconds < 10:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


class Window(Record):
    """The steps that a number was taken from, first and last included."""

    first_step: int = Field(ge=0)
    last_step: int = Field(ge=0)

    @model_validator(mode="after")
    def _ordered(self) -> Window:
        if self.last_step < self.first_step:
            raise ValueError(f"window ends ({self.last_step}) before it begins ({self.first_step})")
        return self

    def __str__(self) -> str:
        return f"steps {self.first_step}-{self.last_step}"


class Source(Record):
    """A file that a number was taken from, with its digest when it was read."""

    path: str = Field(min_length=1)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    window: Window | None


class Measurement(Record):
    """One measured value: it cannot exist without unit, sample size, window, source and digest.

    `path` is relative to the run's folder; `sha256` is the digest of that file when it was read.
    `window` is None only for values that are no statistic over steps (a count, a version). A
    number that rests on several files names the first there and the rest in `others`.
    """

    name: str = Field(min_length=1)
    value: Scalar
    unit: str
    n: int = Field(ge=1)
    window: Window | None
    path: str = Field(min_length=1)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    stdev: float | None = None
    interval: tuple[float, float] | None = None
    note: str = ""
    others: tuple[Source, ...] = ()

    @property
    def sources(self) -> tuple[Source, ...]:
        """Every file that the number rests on."""
        return (Source(path=self.path, sha256=self.sha256, window=self.window), *self.others)

    @property
    def named(self) -> tuple[tuple[str, ...], int]:
        """The files to name where there is little room, and how many more there are.

        Of more than three, the first alone.
        """
        paths = tuple(source.path for source in self.sources)
        return (paths, 0) if len(paths) <= 3 else (paths[:1], len(paths) - 1)

    @property
    def where(self) -> str:
        """The files as text."""
        paths, more = self.named
        return ", ".join(paths) + (f" and {more} more" if more else "")

    def __str__(self) -> str:
        spread = f" +- {plain_number(self.stdev)}" if self.stdev is not None else ""
        unit = f" {self.unit}" if self.unit else ""
        window = f", {self.window}" if self.window else ""
        return f"{plain_number(self.value)}{spread}{unit} (n={self.n}{window}, {self.where})"


MAX_POINTS = 400


class Mark(Record):
    """A labelled level, such as a limit, to hold values against."""

    label: str = Field(min_length=1)
    value: float


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


def thin_points(
    xs: Sequence[float], ys: Sequence[float], *, keep: int
) -> tuple[tuple[float, float], ...]:
    """At most `keep` of the points, in order: the lowest and highest of each stretch survive.

    Dips and peaks are what a reader looks for, so a plain stride would hide them.
    """
    points = [(float(x), float(y)) for x, y in zip(xs, ys, strict=True)]
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
