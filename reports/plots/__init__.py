"""The pictures of a report, as inline SVG: what decided, drawn from the record alone.

No scripts, nothing fetched, every text escaped; colours are CSS classes of the page, so that one
drawing serves light, dark and paper.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from markupsafe import Markup

from reports.plots.bars import Interval, Timeline
from reports.plots.traces import Traces
from reports.text import one_line
from runbook.records import PhaseRecord, RunRecord, Series


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One picture. `phase` is the phase that it belongs to, empty for the whole run.

    `kind` is timeline, interval, or the group of the curves (throughput, loss, memory, tensors,
    gates); trace where a curve has none. `title` and `caption` are plain text; `svg` says in its
    `desc` what it shows.
    """

    kind: str
    phase: str
    title: str
    caption: str
    svg: Markup


def figures(record: RunRecord) -> tuple[Figure, ...]:
    """Every picture of the run: first its course, then phase by phase what decided."""
    drawn = [("", Timeline(record)), *((p.name, one) for p in record.phases for one in _of(p))]
    return tuple(
        Figure(
            kind=one.kind,
            phase=phase,
            title=one_line(one.title),
            caption=one_line(one.caption),
            svg=one.svg(),
        )
        for phase, one in drawn
        if not one.empty
    )


def _of(phase: PhaseRecord) -> Iterator[Interval | Traces]:
    """What decided, and the curves that share a scale; one without a group stands alone."""
    yield from map(Interval, phase.checks)
    groups: dict[tuple[str, str], list[Series]] = {}
    for curve in phase.series:
        groups.setdefault((curve.group, "" if curve.group else curve.name), []).append(curve)
    yield from (Traces(group, curves) for (group, _), curves in groups.items())
