"""The pictures of a report, as inline SVG: what decided, drawn from the record alone.

No scripts, nothing fetched, every text escaped; colours are CSS classes of the page, so that one
drawing serves light, dark and paper.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from markupsafe import Markup

from reports.plots.forest import Forest, forest_of_check
from reports.plots.timeline import Timeline
from reports.plots.traces import Traces
from reports.row import one_line
from runbook.records import PhaseRecord, RunRecord, Series


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One picture. `phase` is the phase that it belongs to, empty for the whole run.

    `kind` is timeline, comparison, interval, or the group of the curves (throughput, loss, memory,
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
    return (*_course(record), *(one for phase in record.phases for one in _of_phase(phase)))


def _course(record: RunRecord) -> Iterator[Figure]:
    course = Timeline(record)
    if course.bars:
        yield Figure(
            kind="timeline", phase="", title=course.title, caption=course.caption, svg=course.svg()
        )


def _of_phase(phase: PhaseRecord) -> Iterator[Figure]:
    drawn: list[tuple[str, Forest | Traces]] = [
        ("comparison", Forest(comparison)) for comparison in phase.comparisons
    ]
    compared = {comparison.check for comparison in phase.comparisons}
    for check in phase.checks:
        found = None if check.id in compared else forest_of_check(check)
        drawn += [("interval", found)] if found else []
    drawn += [(group or "trace", Traces(group, curves)) for group, curves in _groups(phase.series)]
    for kind, one in drawn:
        if not one.empty:
            yield Figure(
                kind=kind,
                phase=phase.name,
                title=one_line(one.title),
                caption=one_line(one.caption),
                svg=one.svg(),
            )


def _groups(series: tuple[Series, ...]) -> list[tuple[str, tuple[Series, ...]]]:
    """The curves that share a scale; one without a group stands alone."""
    found: dict[tuple[str, str], list[Series]] = {}
    for number, curve in enumerate(series):
        alone = "" if curve.group else str(number)
        found.setdefault((curve.group, alone), []).append(curve)
    return [(group, tuple(curves)) for (group, _), curves in found.items()]
