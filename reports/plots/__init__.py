"""The pictures of a report, as inline SVG: what decided, drawn from the record alone.

No scripts, nothing fetched, every text escaped; colours are CSS classes of the page, so that one
drawing serves light, dark and paper.
"""

from __future__ import annotations

from collections.abc import Iterator

from reports.plots.bars import Interval, Timeline
from reports.plots.traces import Traces
from runbook.records import PhaseRecord, RunRecord, Series

# `kind` is timeline, interval, or the group of the curves (throughput, loss, memory, tensors,
# gates); trace where a curve has none. `phase` is empty for the whole run.
Figure = Timeline | Interval | Traces


def figures(record: RunRecord) -> tuple[Figure, ...]:
    """Every picture of the run: first its course, then phase by phase what decided."""
    of_phases = (one for phase in record.phases for one in _of(phase))
    return tuple(one for one in (Timeline(record), *of_phases) if not one.empty)


def _of(phase: PhaseRecord) -> Iterator[Interval | Traces]:
    """What decided, and the curves that share a scale; one without a group stands alone."""
    yield from map(Interval, phase.checks)
    groups: dict[tuple[str, str], list[Series]] = {}
    for curve in phase.series:
        groups.setdefault((curve.group, "" if curve.group else curve.name), []).append(curve)
    yield from (Traces(phase.name, group, curves) for (group, _), curves in groups.items())
