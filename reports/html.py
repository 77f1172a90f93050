"""The HTML report: one page that needs nothing but itself."""

from __future__ import annotations

from reports.markdown import render_exports
from reports.plots import interval_plot, series_plot, table_plot
from reports.templating import html_environment
from reports.view import ReportView, build_view
from runbook.records import RunRecord

__all__ = ["render_html"]


def render_html(record: RunRecord) -> str:
    """Return `report.html`: no scripts, no network, light and dark, readable on a phone."""
    template = html_environment().get_template("report.html.j2")
    view = build_view(record)
    return template.render(
        run=record,
        view=view,
        exports=render_exports(record),
        longest_s=_longest(view),
        interval_plot=interval_plot,
        series_plot=series_plot,
        table_plot=table_plot,
    )


def _longest(view: ReportView) -> float:
    """The longest phase in seconds, never zero: bars are shares of it."""
    return max((phase.record.duration_s for phase in view.phases), default=0.0) or 1.0
