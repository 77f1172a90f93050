"""`run.json`: everything a report says, and nothing it does not; and the contract of a report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from pydantic import Field

from runbook.records.launch import Launch, LaunchResult
from runbook.records.measurement import Cell, Measurement, Record
from runbook.records.outcome import Check, Outcome, Verdict

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


class Table(Record):
    """A table of a phase, such as bucket size against last-50-step mean and stdev."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""


class LaunchEntry(Record):
    """A planned launch beside its result."""

    launch: Launch
    result: LaunchResult


class ArtifactRecord(Record):
    """A file of the run, relative to its folder, with its digest."""

    path: str
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    size_bytes: int = Field(ge=0)


class PhaseRecord(Record):
    """One phase: launches, measurements, checks, tables, and what it chose for later phases."""

    name: str
    title: str
    source: str
    outcome: Outcome
    optional: bool = False
    started_at: str = ""
    duration_s: float = 0.0
    launches: tuple[LaunchEntry, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    checks: tuple[Check, ...] = ()
    tables: tuple[Table, ...] = ()
    series: tuple[Series, ...] = ()
    choices: dict[str, str] = Field(default_factory=dict)
    notes: tuple[str, ...] = ()


class RunRecord(Record):
    """One run of the runbook on one machine."""

    schema_version: Literal[1] = 1
    tool_version: str
    run_id: str
    profile: str
    profile_sha256: str
    profile_document: dict[str, object]
    scope: str
    verdict: Verdict
    reasons: tuple[str, ...]
    started_at: str
    finished_at: str | None
    interrupted: bool = False
    command: str
    settings: dict[str, str] = Field(default_factory=dict)
    options: dict[str, str | int | float | bool | None] = Field(default_factory=dict)
    environment: dict[str, str] = Field(default_factory=dict)
    required: tuple[str, ...]
    phases: tuple[PhaseRecord, ...]
    exports: dict[str, str] = Field(default_factory=dict)
    artifacts: tuple[ArtifactRecord, ...] = ()

    def checks(self) -> tuple[Check, ...]:
        """All checks, in the order of the phases."""
        return tuple(check for phase in self.phases for check in phase.checks)


@dataclass(frozen=True, kw_only=True)
class Screen:
    """How a report is shown to a person; a file is written with the defaults.

    `color`: escape codes are welcome. `location`: the run's folder as the reader would type it.
    `brief`: only what is left to say where the phases were shown while they ran.
    """

    color: bool = False
    location: str = ""
    brief: bool = False


@dataclass(frozen=True, kw_only=True)
class Report:
    """One format, found through the entry points of the group `runbook.reports`.

    `file_name` is where a run keeps it; `render` is a pure function of the record, and of the
    screen if it is made for one. Raises nothing for what a record holds.
    """

    file_name: str
    render: Callable[[RunRecord, Screen], str]

    def text(self, record: RunRecord, screen: Screen | None = None) -> str:
        """The rendered report."""
        return self.render(record, screen or Screen())
