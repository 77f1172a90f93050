"""The pages of a run: `report.md` to read first, `details.md` for the rest, `report.html` for both.

No page needs anything from outside; style and script of the HTML stand in it.
"""

from __future__ import annotations

from base64 import b64encode
from functools import lru_cache
from hashlib import sha256

from markupsafe import Markup

from reports.permits import permit_of
from reports.plots import figures
from reports.summary import summarize
from reports.text import template_environment
from reports.view import build_view
from runbook.records import RunRecord
from runbook.records.run import Report, Screen


def render_markdown(record: RunRecord, _: Screen) -> str:
    """Return `report.md`: what decided, what to use and what to do, on one or two pages."""
    return _markdown("report.md.j2", record)


def render_details(record: RunRecord, _: Screen) -> str:
    """Return `details.md`: every check, table, launch, note, setting and file."""
    return _markdown("details.md.j2", record)


def _markdown(template: str, record: RunRecord) -> str:
    view = build_view(record)
    page = template_environment(html=False).get_template(template)
    return page.render(run=record, view=view, summary=summarize(view), permit=permit_of(record))


def render_html(record: RunRecord, _: Screen) -> str:
    """Return `report.html`: one file, light and dark, on paper, readable on a phone."""
    view = build_view(record)
    style, script = _own("report.css.j2"), _own("report.js.j2")
    page = template_environment(html=True).get_template("report.html.j2")
    return page.render(
        run=record,
        view=view,
        summary=summarize(view),
        permit=permit_of(record),
        figures=figures(record),
        style=style,
        script=script,
        allowed_style=_allowed(style),
        allowed_script=_allowed(script),
    )


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
