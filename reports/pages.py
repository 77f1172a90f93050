"""The pages of a run: `report.md` to read first, `details.md` for the rest, `report.html` for both.

No page needs anything from outside; style and script of the HTML stand in it.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from functools import lru_cache
from hashlib import sha256
from typing import Any

from markupsafe import Markup

from reports.cases import accused_of
from reports.plots.figures import Interval, Timeline, Traces
from reports.summary import summarize
from reports.text import template_environment
from reports.view import build_view, permit_of
from runbook.records import PhaseRecord, RunRecord, Series
from runbook.records.run import Report, Screen


def render_markdown(record: RunRecord, _: Screen) -> str:
    """Return `report.md`: what decided, what to use and what to do, on one or two pages."""
    return _markdown("report.md.j2", record)


def render_details(record: RunRecord, _: Screen) -> str:
    """Return `details.md`: every check, table, launch, note, setting and file."""
    return _markdown("details.md.j2", record)


def _markdown(template: str, record: RunRecord) -> str:
    page = template_environment(html=False).get_template(template)
    return page.render(**_told_by_all(record))


def _told_by_all(record: RunRecord) -> dict[str, Any]:
    """What every page has of a run."""
    view = build_view(record)
    return {
        "run": record,
        "view": view,
        "summary": summarize(view),
        "permit": permit_of(record),
        "nodes": accused_of(record),
    }


def render_html(record: RunRecord, _: Screen) -> str:
    """Return `report.html`: one file, light and dark, on paper, readable on a phone."""
    style, script = _own("report.css.j2"), _own("report.js.j2")
    page = template_environment(html=True).get_template("report.html.j2")
    return page.render(
        **_told_by_all(record),
        figures=figures(record),
        style=style,
        script=script,
        allowed_style=_allowed(style),
        allowed_script=_allowed(script),
    )


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


@lru_cache(maxsize=2)
def _own(template: str) -> Markup:
    """Style or script of the page; these templates take no value of any record."""
    return Markup(template_environment(html=True).get_template(template).render())  # noqa: S704


def _allowed(text: str) -> str:
    """The source expression by which a Content-Security-Policy allows exactly this text."""
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


HTML = Report(file_name="report.html", render=render_html)
MARKDOWN = Report(file_name="report.md", render=render_markdown)
DETAILS = Report(file_name="details.md", render=render_details)
